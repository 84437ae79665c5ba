//! Events for clients that listen.
//!
//! Each event belongs to the owner of its object. [`Events`] sends to every listener without waiting for one: a slow
//! listener may fall behind by a fixed number of events.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use forkd_api::{EventInfo, EventKind};
use tokio::sync::broadcast;

use crate::clock;

/// How many events a slow listener may be behind.
const BACKLOG: usize = 1024;

type OwnerOf = Box<dyn Fn(EventKind, &str) -> Option<String> + Send + Sync>;

/// Sends events to every listener.
pub struct Events {
    sender: broadcast::Sender<EventInfo>,
    next: AtomicU64,
    owner_of: OwnerOf,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Events {
    /// `owner_of` finds the owner of an object that still exists.
    pub fn new(
        owner_of: impl Fn(EventKind, &str) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            sender: broadcast::channel(BACKLOG).0,
            next: AtomicU64::new(1),
            owner_of: Box::new(owner_of),
        }
    }

    /// Sends an event about an object that exists.
    pub fn tell(&self, kind: EventKind, object: impl ToString, detail: Option<String>) {
        let object = object.to_string();
        let owner = (self.owner_of)(kind, &object);
        self.tell_of(owner, kind, object, detail);
    }

    /// Sends an event about an object whose owner is known, also if the object is gone.
    pub fn tell_of(
        &self,
        owner: Option<String>,
        kind: EventKind,
        object: impl ToString,
        detail: Option<String>,
    ) {
        let mut event = self.make(kind, object.to_string(), detail);
        event.owner = owner;
        // It fails when no client listens.
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
            owner: None,
        }
    }

    /// All events from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<EventInfo> {
        self.sender.subscribe()
    }
}
