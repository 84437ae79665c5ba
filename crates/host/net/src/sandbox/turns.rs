//! The turns of TCP flows under the byte limits of a sandbox.
//!
//! Without a rate every turn may move [`TURN`] bytes. With one, a flow that used up the rate waits in a queue. While
//! flows wait, a flow that becomes ready joins the end of the queue, so that no flow can starve the others.

use std::collections::VecDeque;
use std::time::Instant;

use forkd_types::NetLimits;

use crate::limit::{ByteLimits, Direction};
use crate::tcp::{Allowance, Moved, TURN};

/// The byte limits of a sandbox, and the flows that wait for them.
#[derive(Debug)]
pub struct ByteTurns {
    limits: ByteLimits,
    /// Bytes that the guest sent before its counters began.
    before: u64,
    /// The slots of flows that wait, the first one longest.
    waiting: VecDeque<u32>,
    /// When they go on.
    until: Option<Instant>,
    /// Flows of the queue are served now.
    serving: bool,
}

impl ByteTurns {
    pub fn new(limits: &NetLimits, before: u64, now: Instant) -> Self {
        Self {
            limits: ByteLimits::new(limits, now),
            before,
            waiting: VecDeque::new(),
            until: None,
            serving: false,
        }
    }

    /// Puts new limits in force. Flows that wait go on at once.
    pub fn set(&mut self, limits: &NetLimits, now: Instant) {
        self.limits = ByteLimits::new(limits, now);
        self.until = self.until.map(|_| now);
    }

    pub fn wakes_at(&self) -> Option<Instant> {
        self.until
    }

    /// Bytes that the guest sent in all if its counters say `up`.
    pub fn sent(&self, up: u64) -> u64 {
        self.before.saturating_add(up)
    }

    /// The guest has sent all that it may if its counters say `up`.
    pub fn is_over(&self, up: u64) -> bool {
        self.limits.left(self.sent(up)) == Some(0)
    }

    /// The bytes that a flow may move now, if the counters of the guest say `up`.
    pub fn turn(&mut self, up: u64, now: Instant) -> Allowance {
        let queue = !self.waiting.is_empty() && !self.serving;
        let left = self.limits.left(self.sent(up));
        let most = left.map_or(TURN, |left| usize::try_from(left).unwrap_or(TURN).min(TURN));
        let mut allowed = |direction, most| match queue && self.limits.has_rate(direction) {
            true => 0,
            false => self.limits.allowed(direction, most, now),
        };
        Allowance {
            up: allowed(Direction::Up, most),
            down: allowed(Direction::Down, TURN),
        }
    }

    pub fn spent(&mut self, moved: Moved) {
        let bytes = |moved: u64| usize::try_from(moved).unwrap_or(usize::MAX);
        self.limits.spend(Direction::Up, bytes(moved.up));
        self.limits.spend(Direction::Down, bytes(moved.down));
    }

    /// Takes a datagram from the rate. False if it is lost.
    pub fn take_datagram(&mut self, direction: Direction, len: usize, now: Instant) -> bool {
        let there = self.limits.allowed(direction, usize::MAX, now) >= len;
        if there {
            self.limits.spend(direction, len);
        }
        there
    }

    /// Puts a flow at the end of the queue.
    pub fn wait(&mut self, slot: u32, now: Instant) {
        self.waiting.push_back(slot);
        self.until = self.until.or_else(|| Some(self.limits.ready_at(now)));
    }

    /// The flows to serve now. [`Self::served`] follows.
    pub fn due(&mut self, now: Instant) -> Vec<u32> {
        if self.until.is_none_or(|until| until > now) {
            return Vec::new();
        }
        self.serving = true;
        self.until = None;
        self.waiting.drain(..).collect()
    }

    /// Ends a round: the flow that was served first waits behind the others.
    pub fn served(&mut self, now: Instant) {
        if !std::mem::take(&mut self.serving) {
            return;
        }
        if self.waiting.len() > 1 {
            self.waiting.rotate_left(1);
        }
        self.until = (!self.waiting.is_empty()).then(|| self.limits.ready_at(now));
    }
}
