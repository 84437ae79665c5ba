//! Reaps every child that ends, in one place.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::process::Command;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, oneshot};

use crate::sys::{self, Reaped};

/// Knows which children a task waits for. All children are started through it and on the one thread
/// that also reaps, so none can end unnoticed in between.
#[derive(Default)]
pub struct Reaper {
    waiting: RefCell<HashMap<u32, oneshot::Sender<Reaped>>>,
    ended: Notify,
}

/// A child under way.
pub struct Child {
    pub pid: u32,
    pub ended: oneshot::Receiver<Reaped>,
}

impl Reaper {
    /// Starts a child.
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let child = command.spawn()?;
        let (sender, ended) = oneshot::channel();
        self.waiting.borrow_mut().insert(child.id(), sender);
        Ok(Child {
            pid: child.id(),
            ended,
        })
    }

    /// Waits until some child has ended.
    pub async fn next_end(&self) {
        self.ended.notified().await;
    }

    /// Reaps for ever: the agent's children and, for PID 1, all orphans.
    pub async fn run(&self) -> io::Result<()> {
        let mut children = signal(SignalKind::child())?;
        loop {
            while let Some((pid, reaped)) = sys::reap_one() {
                if let Some(sender) = self.waiting.borrow_mut().remove(&pid) {
                    let _ = sender.send(reaped);
                }
                self.ended.notify_waiters();
            }
            if children.recv().await.is_none() {
                return Ok(());
            }
        }
    }
}
