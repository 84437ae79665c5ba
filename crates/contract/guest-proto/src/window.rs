//! Credit: how many bytes a sender may have under way on one channel.
//!
//! Both ends of a channel start from the window that the *receiver* named in its hello. A frame costs its payload and
//! [`FRAME_COST`]; the receiver gives that back when its consumer has taken the frame. The fixed part is about the
//! memory that a frame takes in a queue beside its payload: without it, a window of one-byte frames would hold many
//! times its size.

use thiserror::Error;

/// The window of a side that names none.
pub const DEFAULT: u32 = 256 * 1024;
/// The smallest window a side may name.
pub const MIN: u32 = 16 * 1024;
/// The largest window a side may name.
pub const MAX: u32 = 16 * 1024 * 1024;

/// The part of a frame's cost that does not depend on its payload, bytes.
pub const FRAME_COST: usize = 64;

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

    /// The largest payload that one frame may carry now.
    #[must_use]
    pub fn available(&self) -> usize {
        usize::try_from(self.available)
            .unwrap_or(usize::MAX)
            .saturating_sub(FRAME_COST)
    }

    /// Takes credit for one frame with a payload of up to `wanted` bytes, and returns for how many. Zero means that
    /// there is no credit and none was taken.
    pub fn take(&mut self, wanted: usize) -> usize {
        let got = wanted.min(self.available());
        if got > 0 {
            self.available -= (got + FRAME_COST) as u64;
        }
        got
    }

    /// Takes credit for one frame with a payload of exactly `length` bytes, or none.
    pub fn take_whole(&mut self, length: usize) -> bool {
        length <= self.available() && self.take(length) == length
    }

    /// Gives back the part of the credit for one frame that was not used. A frame that was not sent is no use at all.
    pub fn give_back(&mut self, taken: usize, used: usize) {
        let unused = match used {
            0 => taken + FRAME_COST,
            used => taken.saturating_sub(used),
        };
        self.add(u32::try_from(unused).unwrap_or(u32::MAX));
    }

    /// Adds what the receiver gave back. A receiver that gives back more than it ever can have taken is
    /// cut off at [`MAX`].
    pub fn add(&mut self, credit: u32) {
        self.available = (self.available + u64::from(credit)).min(u64::from(MAX));
    }
}

/// The sender used credit that it did not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the peer used {excess} bytes of credit more than it had")]
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

    /// Counts a frame that came in, by the length of its payload.
    pub fn receive(&mut self, length: usize) -> Result<(), Overrun> {
        let outstanding = self.outstanding.saturating_add(cost(length));
        if outstanding > self.window {
            return Err(Overrun {
                excess: outstanding - self.window,
            });
        }
        self.outstanding = outstanding;
        Ok(())
    }

    /// Counts a frame that the consumer took, by the length of its payload. Returns how much credit to give back, in
    /// portions of at least a quarter of the window, so that small reads do not cost a frame each.
    pub fn consume(&mut self, length: usize) -> Option<u32> {
        self.consumed = self
            .consumed
            .saturating_add(cost(length))
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

fn cost(length: usize) -> u64 {
    (length as u64).saturating_add(FRAME_COST as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_sender_never_gets_more_than_it_was_granted() {
        let mut sender = SendWindow::new(MIN);
        assert_eq!(sender.take(usize::MAX), MIN as usize - FRAME_COST);
        assert_eq!(sender.take(1), 0);
        sender.add(10);
        assert_eq!(sender.take(100), 0);
        sender.add(FRAME_COST as u32);
        assert!(!sender.take_whole(11) && sender.take_whole(10));
    }

    #[test]
    fn credit_for_a_frame_that_is_not_sent_is_not_lost() {
        let mut sender = SendWindow::new(MIN);
        let before = sender.available();
        let taken = sender.take(100);
        sender.give_back(taken, 0);
        assert_eq!(sender.available(), before);
        let taken = sender.take(100);
        sender.give_back(taken, 40);
        assert_eq!(sender.available(), before - 40 - FRAME_COST);
    }

    #[test]
    fn a_window_of_small_frames_holds_few_of_them() {
        let mut receiver = RecvWindow::new(MIN);
        let held = (0..).take_while(|_| receiver.receive(1).is_ok()).count();
        assert_eq!(held, MIN as usize / (1 + FRAME_COST));
    }

    #[test]
    fn an_overrun_is_noticed() {
        let mut receiver = RecvWindow::new(MIN);
        receiver.receive(MIN as usize - FRAME_COST).unwrap();
        let excess = 3 + FRAME_COST as u64;
        assert_eq!(receiver.receive(3), Err(Overrun { excess }));
    }

    proptest! {
        #[test]
        fn sender_and_receiver_agree(steps in prop::collection::vec((1usize..100_000, 0usize..4), 1..200)) {
            let mut sender = SendWindow::new(DEFAULT);
            let mut receiver = RecvWindow::new(DEFAULT);
            let mut held = std::collections::VecDeque::new();
            for (send, read) in steps {
                let sent = sender.take(send);
                if sent > 0 {
                    receiver.receive(sent).unwrap();
                    held.push_back(sent);
                }
                prop_assert!(held.iter().map(|sent| sent + FRAME_COST).sum::<usize>() <= DEFAULT as usize);
                for taken in held.drain(..read.min(held.len())) {
                    if let Some(credit) = receiver.consume(taken) {
                        sender.add(credit);
                    }
                }
            }
            // Whatever happened, an empty receiver leaves the sender able to go on.
            for taken in held {
                if let Some(credit) = receiver.consume(taken) {
                    sender.add(credit);
                }
            }
            prop_assert!(sender.available() >= (DEFAULT as usize) / 2);
        }
    }
}
