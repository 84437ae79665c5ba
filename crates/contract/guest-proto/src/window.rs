//! Credit: how many bytes a sender may have under way on one channel.
//!
//! Both ends of a channel start from the window that the *receiver* named in its hello. Sending takes
//! from it; the receiver gives back what its consumer has taken.

use thiserror::Error;

/// The window of a side that names none.
pub const DEFAULT: u32 = 256 * 1024;
/// The smallest window a side may name.
pub const MIN: u32 = 16 * 1024;
/// The largest window a side may name.
pub const MAX: u32 = 16 * 1024 * 1024;

/// The sender's end of a channel.
#[derive(Debug, Clone)]
pub struct SendWindow {
    available: u64,
}

impl SendWindow {
    /// Starts with what the receiver's hello named.
    #[must_use]
    pub fn new(window: u32) -> Self {
        Self {
            available: u64::from(window.clamp(MIN, MAX)),
        }
    }

    /// How many bytes may be sent now.
    #[must_use]
    pub fn available(&self) -> usize {
        usize::try_from(self.available).unwrap_or(usize::MAX)
    }

    /// Takes up to `wanted` bytes of credit and says how many it got.
    pub fn take(&mut self, wanted: usize) -> usize {
        let got = wanted.min(self.available());
        self.available -= got as u64;
        got
    }

    /// Adds what the receiver gave back. A receiver that gives back more than it ever can have taken is
    /// cut off at [`MAX`].
    pub fn add(&mut self, credit: u32) {
        self.available = (self.available + u64::from(credit)).min(u64::from(MAX));
    }
}

/// The sender used credit that it did not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the peer sent {excess} bytes more than its window allows")]
pub struct Overrun {
    /// By how much.
    pub excess: u64,
}

/// The receiver's end of a channel.
#[derive(Debug, Clone)]
pub struct RecvWindow {
    window: u64,
    outstanding: u64,
    consumed: u64,
}

impl RecvWindow {
    /// Starts with what our own hello named.
    #[must_use]
    pub fn new(window: u32) -> Self {
        Self {
            window: u64::from(window.clamp(MIN, MAX)),
            outstanding: 0,
            consumed: 0,
        }
    }

    /// Counts bytes that came in.
    pub fn receive(&mut self, bytes: usize) -> Result<(), Overrun> {
        let outstanding = self.outstanding.saturating_add(bytes as u64);
        if outstanding > self.window {
            return Err(Overrun {
                excess: outstanding - self.window,
            });
        }
        self.outstanding = outstanding;
        Ok(())
    }

    /// Counts bytes that the consumer took. Says how much credit to give back, in portions of at least a
    /// quarter of the window, so that small reads do not cost a frame each.
    pub fn consume(&mut self, bytes: usize) -> Option<u32> {
        self.consumed = self
            .consumed
            .saturating_add(bytes as u64)
            .min(self.outstanding);
        if self.consumed == 0 || self.consumed < self.window / 4 {
            return None;
        }
        let credit = self.consumed;
        self.outstanding -= credit;
        self.consumed = 0;
        u32::try_from(credit).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_sender_never_gets_more_than_it_was_granted() {
        let mut sender = SendWindow::new(MIN);
        assert_eq!(sender.take(usize::MAX), MIN as usize);
        assert_eq!(sender.take(1), 0);
        sender.add(10);
        assert_eq!(sender.take(100), 10);
    }

    #[test]
    fn an_overrun_is_noticed() {
        let mut receiver = RecvWindow::new(MIN);
        receiver.receive(MIN as usize).unwrap();
        assert_eq!(receiver.receive(3), Err(Overrun { excess: 3 }));
    }

    proptest! {
        #[test]
        fn sender_and_receiver_agree(steps in prop::collection::vec((1usize..100_000, 0usize..100_000), 1..200)) {
            let mut sender = SendWindow::new(DEFAULT);
            let mut receiver = RecvWindow::new(DEFAULT);
            let mut held = 0usize;
            for (send, read) in steps {
                let sent = sender.take(send);
                receiver.receive(sent).unwrap();
                held += sent;
                prop_assert!(held <= DEFAULT as usize);
                let read = read.min(held);
                held -= read;
                if let Some(credit) = receiver.consume(read) {
                    sender.add(credit);
                }
            }
            // Whatever happened, an empty receiver leaves the sender able to go on.
            if let Some(credit) = receiver.consume(held) {
                sender.add(credit);
            }
            prop_assert!(sender.available() >= (DEFAULT as usize) / 2);
        }
    }
}
