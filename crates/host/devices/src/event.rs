//! Event and timer descriptors that wake an event loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// A counter that can be waited for; KVM raises it for doorbells and listens to it for interrupts.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one, non-blocking and closed on exec.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?))
    }

    /// Raises it. A full counter is as good as a raised one.
    pub fn signal(&self) -> io::Result<()> {
        match rustix::io::write(&self.0, &1u64.to_ne_bytes()) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes what has been raised; true if there was anything.
    pub fn take(&self) -> bool {
        let mut count = [0u8; 8];
        matches!(rustix::io::read(&self.0, &mut count), Ok(8))
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A one-shot timer on the monotonic clock.
#[derive(Debug)]
pub struct TimerFd(OwnedFd);

impl TimerFd {
    /// A new one, not armed.
    pub fn new() -> io::Result<Self> {
        Ok(Self(timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?))
    }

    /// Makes it fire once, `after` from now; at once if that is zero.
    pub fn arm(&self, after: Duration) -> io::Result<()> {
        let after = after.max(Duration::from_nanos(1));
        let value = Timespec {
            tv_sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(after.subsec_nanos()),
        };
        self.set(value)
    }

    pub fn disarm(&self) -> io::Result<()> {
        self.set(Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        })
    }

    fn set(&self, value: Timespec) -> io::Result<()> {
        let spec = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: value,
        };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &spec)?;
        Ok(())
    }

    /// Takes an expiry; true if it had fired.
    pub fn take(&self) -> bool {
        let mut count = [0u8; 8];
        matches!(rustix::io::read(&self.0, &mut count), Ok(8))
    }
}

impl AsFd for TimerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_taken_once() {
        let event = EventFd::new().unwrap();
        assert!(!event.take());
        event.signal().unwrap();
        event.signal().unwrap();
        assert!(event.take());
        assert!(!event.take());
    }

    #[test]
    fn a_disarmed_timer_does_not_fire() {
        let timer = TimerFd::new().unwrap();
        timer.arm(Duration::from_secs(3600)).unwrap();
        timer.disarm().unwrap();
        assert!(!timer.take());
        timer.arm(Duration::ZERO).unwrap();
        let mut fds = [rustix::event::PollFd::new(
            &timer,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut fds, None).unwrap();
        assert!(timer.take());
    }
}
