//! The queue of frames on their way to the host.

use std::cell::{Cell, RefCell};

use forkd_guest_proto::{Kind, frame};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;

/// Above this many bytes senders wait, so that a host that does not read holds up processes and not memory.
const HIGH_WATER: usize = 256 * 1024;

/// The connection is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closed;

/// Frames that wait for the one task that writes.
#[derive(Default)]
pub struct Outbox {
    waiting: RefCell<Vec<u8>>,
    closed: Cell<bool>,
    writing: Cell<bool>,
    ready: Notify,
    room: Notify,
}

impl Outbox {
    /// Queues a frame, after waiting for room.
    pub async fn send(
        &self,
        stream: u32,
        kind: Kind,
        channel: u8,
        payload: &[u8],
    ) -> Result<(), Closed> {
        loop {
            if self.closed.get() {
                return Err(Closed);
            }
            if self.waiting.borrow().len() < HIGH_WATER {
                self.send_now(stream, kind, channel, payload);
                return Ok(());
            }
            self.room.notified().await;
        }
    }

    /// Queues a small frame without waiting. For credit, which the other side bounds.
    pub fn send_now(&self, stream: u32, kind: Kind, channel: u8, payload: &[u8]) {
        if !self.closed.get() {
            frame::encode_into(
                &mut self.waiting.borrow_mut(),
                stream,
                kind,
                channel,
                payload,
            );
            self.ready.notify_one();
        }
    }

    /// Nothing can be sent any more.
    pub fn close(&self) {
        self.closed.set(true);
        self.ready.notify_one();
        self.room.notify_waiters();
    }

    /// Waits until everything has been handed to the kernel, or nothing can be any more.
    pub async fn flushed(&self) {
        while !self.closed.get() && (self.writing.get() || !self.waiting.borrow().is_empty()) {
            self.room.notified().await;
        }
    }

    /// Writes until the connection is closed or fails.
    pub async fn write_all_to(&self, writer: &mut (impl AsyncWrite + Unpin)) {
        loop {
            let batch = std::mem::take(&mut *self.waiting.borrow_mut());
            if batch.is_empty() {
                if self.closed.get() {
                    let _ = writer.shutdown().await;
                    return;
                }
                self.ready.notified().await;
                continue;
            }
            self.room.notify_waiters();
            self.writing.set(true);
            if writer.write_all(&batch).await.is_err() {
                return self.close();
            }
            self.writing.set(false);
            self.room.notify_waiters();
        }
    }
}
