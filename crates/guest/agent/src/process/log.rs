//! The newest output of a process, for requests that follow it now or later.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use tokio::sync::Notify;

/// One output of a process: a window over its newest bytes, addressed by how many came before.
pub struct Log {
    capacity: usize,
    bytes: RefCell<VecDeque<u8>>,
    start: Cell<u64>,
    ended: Cell<bool>,
    followers: RefCell<Vec<Rc<Position>>>,
    grew: Notify,
    room: Notify,
}

struct Position {
    at: Cell<u64>,
    lossless: bool,
}

/// The next part of a log.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// Bytes, after `lost` bytes that it was too late for.
    Bytes {
        /// How many are gone.
        lost: u64,
        bytes: Vec<u8>,
    },
    /// There will be no more.
    End,
}

impl Log {
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            bytes: RefCell::default(),
            start: Cell::new(0),
            ended: Cell::new(false),
            followers: RefCell::default(),
            grew: Notify::new(),
            room: Notify::new(),
        }
    }

    /// How many bytes came so far.
    pub fn total(&self) -> u64 {
        self.start.get() + self.bytes.borrow().len() as u64
    }

    /// Waits until bytes can be taken without loss for those who must not lose any; says how many.
    pub async fn wait_for_room(&self) -> usize {
        loop {
            let room = self.room_now();
            if room > 0 {
                return room;
            }
            self.room.notified().await;
        }
    }

    fn room_now(&self) -> usize {
        let slowest = self
            .followers
            .borrow()
            .iter()
            .filter(|p| p.lossless)
            .map(|p| p.at.get())
            .min();
        match slowest {
            Some(at) => {
                let pending = usize::try_from(self.total() - at).unwrap_or(usize::MAX);
                self.capacity.saturating_sub(pending)
            }
            None => self.capacity,
        }
    }

    /// Adds bytes; the oldest go.
    pub fn push(&self, new: &[u8]) {
        let mut bytes = self.bytes.borrow_mut();
        let skip = new.len().saturating_sub(self.capacity);
        let new_kept = new.get(skip..).unwrap_or_default();
        let over = (bytes.len() + new_kept.len()).saturating_sub(self.capacity);
        bytes.drain(..over);
        bytes.extend(new_kept);
        self.start.set(self.start.get() + (over + skip) as u64);
        drop(bytes);
        self.grew.notify_waiters();
    }

    /// There will be no more.
    pub fn end(&self) {
        self.ended.set(true);
        self.grew.notify_waiters();
    }

    /// Waits until [`Self::end`] was called.
    pub async fn ended(&self) {
        while !self.ended.get() {
            self.grew.notified().await;
        }
    }

    /// Begins to follow: from the oldest kept byte, or from what comes next.
    pub fn follow(self: &Rc<Self>, replay: bool, lossless: bool) -> Follower {
        let since = if replay { 0 } else { u64::MAX };
        self.follow_since(since, lossless)
    }

    /// Begins to follow at a position, as near as what is kept allows.
    pub fn follow_since(self: &Rc<Self>, since: u64, lossless: bool) -> Follower {
        let at = since.clamp(self.start.get(), self.total());
        let position = Rc::new(Position {
            at: Cell::new(at),
            lossless,
        });
        self.followers.borrow_mut().push(Rc::clone(&position));
        Follower {
            log: Rc::clone(self),
            position,
        }
    }
}

/// One who reads a [`Log`].
pub struct Follower {
    log: Rc<Log>,
    position: Rc<Position>,
}

impl Follower {
    /// Where the next byte stands in the whole output.
    pub fn at(&self) -> u64 {
        self.position.at.get()
    }

    /// Waits until there is something to read, or nothing will come.
    pub async fn ready(&self) {
        while !self.log.ended.get() && self.position.at.get() >= self.log.total() {
            self.log.grew.notified().await;
        }
    }

    /// Takes up to `limit` bytes; `None` when none are there yet.
    pub fn read(&self, limit: usize) -> Option<Read> {
        let start = self.log.start.get();
        let at = self.position.at.get().max(start);
        let lost = at - self.position.at.get();
        let bytes = self.log.bytes.borrow();
        let from = usize::try_from(at - start)
            .unwrap_or(usize::MAX)
            .min(bytes.len());
        let to = from.saturating_add(limit).min(bytes.len());
        if from == to {
            return self.log.ended.get().then_some(Read::End);
        }
        // Slice by slice: byte by byte is what a follower of a fast printer would spend its time on.
        let (front, back) = bytes.as_slices();
        let mut taken = Vec::with_capacity(to - from);
        let cut = front.len();
        taken.extend_from_slice(front.get(from.min(cut)..to.min(cut)).unwrap_or_default());
        let (from, to) = (from.saturating_sub(cut), to.saturating_sub(cut));
        taken.extend_from_slice(back.get(from..to).unwrap_or_default());
        drop(bytes);
        self.position.at.set(at + taken.len() as u64);
        self.log.room.notify_waiters();
        Some(Read::Bytes { lost, bytes: taken })
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.log
            .followers
            .borrow_mut()
            .retain(|other| !Rc::ptr_eq(other, &self.position));
        self.log.room.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(read: Option<Read>) -> (u64, Vec<u8>) {
        match read {
            Some(Read::Bytes { lost, bytes }) => (lost, bytes),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_late_follower_gets_the_newest_and_learns_what_it_missed() {
        let log = Rc::new(Log::new(4));
        let early = log.follow(true, false);
        log.push(b"abcdef");
        assert_eq!(bytes(early.read(10)), (2, b"cdef".to_vec()));
        assert_eq!(early.read(10), None);
        assert_eq!(
            bytes(log.follow(true, false).read(10)),
            (0, b"cdef".to_vec())
        );
        log.end();
        assert_eq!(early.read(10), Some(Read::End));
        assert_eq!(log.total(), 6);
    }

    #[test]
    fn a_lossless_follower_takes_the_room_until_it_reads_or_goes() {
        let log = Rc::new(Log::new(4));
        let follower = log.follow(false, true);
        log.push(b"abcd");
        assert_eq!(log.room_now(), 0);
        assert_eq!(bytes(follower.read(1)), (0, b"a".to_vec()));
        assert_eq!(log.room_now(), 1);
        drop(follower);
        assert_eq!(log.room_now(), 4);
    }

    proptest! {
        #[test]
        fn a_follower_sees_a_suffix_of_each_gap(
            steps in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..40), 0usize..40), 0..60),
        ) {
            let log = Rc::new(Log::new(32));
            let follower = log.follow(true, false);
            let mut all: Vec<u8> = Vec::new();
            let mut at = 0usize;
            for (new, limit) in steps {
                log.push(&new);
                all.extend(&new);
                if let Some(Read::Bytes { lost, bytes }) = follower.read(limit) {
                    at += lost as usize;
                    prop_assert_eq!(&all[at..at + bytes.len()], bytes.as_slice());
                    at += bytes.len();
                }
            }
        }
    }
}
