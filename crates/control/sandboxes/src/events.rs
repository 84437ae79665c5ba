//! What happened, for those who listen.

use std::sync::atomic::{AtomicU64, Ordering};

use forkd_api::{EventInfo, EventKind};
use tokio::sync::broadcast;

use crate::clock;

/// How many events a slow listener may be behind.
const BACKLOG: usize = 1024;

/// Tells every listener what happened.
#[derive(Debug)]
pub struct Events {
    sender: broadcast::Sender<EventInfo>,
    next: AtomicU64,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            sender: broadcast::channel(BACKLOG).0,
            next: AtomicU64::new(1),
        }
    }
}

impl Events {
    /// Something happened.
    pub fn tell(&self, kind: EventKind, object: impl ToString, detail: Option<String>) {
        let event = self.make(kind, object.to_string(), detail);
        // Nobody may be listening.
        let _ = self.sender.send(event);
    }

    /// An event that only one listener gets.
    pub fn make(&self, kind: EventKind, object: String, detail: Option<String>) -> EventInfo {
        EventInfo {
            seq: self.next.fetch_add(1, Ordering::Relaxed),
            at_unix_ms: clock::unix_ms(),
            kind,
            object,
            detail,
        }
    }

    /// All events from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<EventInfo> {
        self.sender.subscribe()
    }
}
