//! Notices from vCPU and device threads to the control thread.
//!
//! [`Notices`] is a bounded queue with an event descriptor. Guests cause most notices, so excess ones are
//! dropped and counted. The end of the machine is always delivered, with its first cause.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forkd_devices::metrics::Counter;
use forkd_devices::{DeviceEvents, EventFd};
use forkd_vmm_proto::{DeviceSlot, StopCause};

/// Upper bound on waiting notices. A guest can make them faster than they are read; excess ones are dropped,
/// and a dropped connection is closed.
const MAX_WAITING: usize = 256;

/// A guest that reports again within this time is not heard: each report is a packet for the daemon.
const READY_AGAIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub enum Notice {
    /// The guest reports that it is ready.
    AgentReady,
    /// The guest connected to a host port.
    VsockConnect {
        port: u32,
        /// The far end.
        stream: OwnedFd,
    },
    /// A device stands still.
    DeviceFailed { slot: DeviceSlot, reason: String },
    /// The machine has ended.
    Stopped(StopCause),
}

#[derive(Debug, Default)]
struct Waiting {
    news: VecDeque<Notice>,
    /// The first cause is the one that counts.
    stopped: Option<StopCause>,
    panicked: bool,
    /// When the guest last said it is ready.
    ready: Option<Instant>,
}

/// The queue. Readable while there is something in it.
#[derive(Debug)]
pub struct Notices {
    waiting: Mutex<Waiting>,
    bell: EventFd,
    /// Every report of the guest that it is ready, whether or not it became an event.
    pub(super) ready_signals: Counter,
    /// Events beyond `MAX_WAITING`.
    pub(super) dropped: Counter,
    /// Bus locks that vCPUs were slowed down for.
    pub(super) bus_locks: Counter,
}

impl Notices {
    /// An empty queue.
    pub fn new() -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            waiting: Mutex::default(),
            bell: EventFd::new()?,
            ready_signals: Counter::default(),
            dropped: Counter::default(),
            bus_locks: Counter::default(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, notice: Notice) {
        self.push_to(&mut self.lock(), notice);
    }

    fn push_to(&self, waiting: &mut Waiting, notice: Notice) {
        if waiting.news.len() < MAX_WAITING {
            waiting.news.push_back(notice);
        } else {
            self.dropped.inc();
        }
        // An eventfd that is open can always be raised.
        let _ = self.bell.signal();
    }

    /// The guest reports that it is ready. Becomes an event at most once in `READY_AGAIN`.
    pub fn ready(&self) {
        self.ready_at(Instant::now());
    }

    fn ready_at(&self, now: Instant) {
        self.ready_signals.inc();
        let mut waiting = self.lock();
        if waiting.ready.is_none_or(|last| now - last >= READY_AGAIN) {
            waiting.ready = Some(now);
            self.push_to(&mut waiting, Notice::AgentReady);
        }
    }

    /// After a roll-back: the next report of the guest is an event at once.
    pub fn expect_ready(&self) {
        self.lock().ready = None;
    }

    /// The guest's kernel reports a panic. The reset that follows is part of it.
    pub fn panicked(&self) {
        self.lock().panicked = true;
        self.stop(StopCause::GuestPanic);
    }

    /// The machine has ended. Only the first cause is kept.
    pub fn stop(&self, cause: StopCause) {
        let mut waiting = self.lock();
        if waiting.stopped.is_none() {
            waiting.stopped = Some(cause);
            waiting.news.push_back(Notice::Stopped(cause));
            let _ = self.bell.signal();
        }
    }

    /// Takes all news.
    pub fn take(&self) -> VecDeque<Notice> {
        self.bell.take();
        std::mem::take(&mut self.lock().news)
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl DeviceEvents for Notices {
    fn agent_ready(&self) {
        self.ready();
    }

    fn vsock_connect(&self, port: u32, stream: OwnedFd) {
        self.push(Notice::VsockConnect { port, stream });
    }

    fn device_failed(&self, slot: DeviceSlot, reason: &str) {
        self.push(Notice::DeviceFailed {
            slot,
            reason: reason.to_owned(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_is_an_event_at_most_once_a_second() {
        let notices = Notices::new().unwrap();
        let start = Instant::now();
        for ms in 0..10_000 {
            notices.ready_at(start + Duration::from_millis(ms));
        }
        assert_eq!(notices.take().len(), 10);
        assert_eq!(notices.ready_signals.get(), 10_000);
        notices.expect_ready();
        notices.ready_at(start + Duration::from_secs(10));
        assert_eq!(
            notices.take().len(),
            1,
            "after a roll-back it counts at once"
        );
    }

    #[test]
    fn the_first_cause_counts_and_a_flood_is_bounded() {
        let notices = Notices::new().unwrap();
        for _ in 0..10_000 {
            notices.device_failed(DeviceSlot::Vsock, "rubbish");
        }
        notices.panicked();
        notices.stop(StopCause::Reset);
        let news = notices.take();
        assert_eq!(news.len(), MAX_WAITING + 1);
        assert_eq!(notices.dropped.get(), 10_000 - MAX_WAITING as u64);
        assert!(matches!(
            news.back(),
            Some(Notice::Stopped(StopCause::GuestPanic))
        ));
        assert!(notices.take().is_empty());
    }
}
