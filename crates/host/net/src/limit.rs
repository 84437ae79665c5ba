//! Limits on the network of a sandbox: rates of events and of bytes, and a total of bytes.
//!
//! A rate is a bucket of tokens that fills with time. Bytes of TCP over the rate wait: the engine stops to read, and the
//! window of the sender closes. Datagrams over the rate are lost.

use std::time::{Duration, Instant};

use forkd_types::NetLimits;

/// Allows `rate` units per second, and a burst of one second.
#[derive(Debug)]
pub struct Bucket {
    rate: f64,
    tokens: f64,
    last: Instant,
}

impl Bucket {
    pub fn new(rate: u32, now: Instant) -> Self {
        Self {
            rate: f64::from(rate),
            tokens: f64::from(rate),
            last: now,
        }
    }

    /// Takes one unit if there is one.
    pub fn take(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.last).as_secs_f64();
        self.last = now;
        self.tokens = (self.tokens + passed * self.rate).min(self.rate);
        let there = self.tokens >= 1.0;
        if there {
            self.tokens -= 1.0;
        }
        there
    }
}

/// The fewest bytes that are worth a turn of a flow.
const QUANTUM: f64 = 16.0 * 1024.0;
/// The largest burst, as a part of a second.
const BURST: f64 = 0.05;
const BYTES_PER_MBIT: f64 = 125_000.0;

/// Allows a rate of bytes, and a burst of 50 milliseconds.
#[derive(Debug)]
struct ByteRate {
    rate: f64,
    burst: f64,
    tokens: f64,
    last: Instant,
}

impl ByteRate {
    fn new(mbit: u32, now: Instant) -> Self {
        let rate = f64::from(mbit) * BYTES_PER_MBIT;
        let burst = (rate * BURST).max(2.0 * QUANTUM);
        Self {
            rate,
            burst,
            tokens: burst,
            last: now,
        }
    }

    /// Bytes that may pass now; none if they are too few for a turn.
    fn allowed(&mut self, now: Instant) -> usize {
        let passed = now.saturating_duration_since(self.last).as_secs_f64();
        self.last = now;
        self.tokens = (self.tokens + passed * self.rate).min(self.burst);
        match self.tokens < QUANTUM {
            true => 0,
            false => self.tokens as usize,
        }
    }

    fn spend(&mut self, bytes: usize) {
        self.tokens -= bytes as f64;
    }

    /// When enough bytes for a turn may pass.
    fn ready_at(&self, now: Instant) -> Instant {
        let missing = (QUANTUM - self.tokens).max(0.0);
        // A millisecond more than exact, so that a timer that is early does not come twice.
        now + Duration::from_secs_f64(missing / self.rate) + Duration::from_millis(1)
    }
}

/// The direction of bytes, seen from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Up,
    Down,
}

/// The limits on bytes of one sandbox.
#[derive(Debug)]
pub struct ByteLimits {
    up: Option<ByteRate>,
    down: Option<ByteRate>,
    total_up: Option<u64>,
}

impl ByteLimits {
    pub fn new(limits: &NetLimits, now: Instant) -> Self {
        let rate = |mbit: Option<u32>| mbit.map(|mbit| ByteRate::new(mbit, now));
        Self {
            up: rate(limits.egress_mbit),
            down: rate(limits.ingress_mbit),
            total_up: limits.egress_mib_total.map(|mib| u64::from(mib) << 20),
        }
    }

    fn rate(&mut self, direction: Direction) -> Option<&mut ByteRate> {
        match direction {
            Direction::Up => self.up.as_mut(),
            Direction::Down => self.down.as_mut(),
        }
    }

    /// Whether bytes in this direction have a rate.
    pub fn has_rate(&self, direction: Direction) -> bool {
        match direction {
            Direction::Up => self.up.is_some(),
            Direction::Down => self.down.is_some(),
        }
    }

    /// Bytes that may pass now, at most `most`.
    pub fn allowed(&mut self, direction: Direction, most: usize, now: Instant) -> usize {
        self.rate(direction)
            .map_or(most, |rate| rate.allowed(now).min(most))
    }

    pub fn spend(&mut self, direction: Direction, bytes: usize) {
        if let Some(rate) = self.rate(direction) {
            rate.spend(bytes);
        }
    }

    /// When a flow that waits may go on.
    pub fn ready_at(&self, now: Instant) -> Instant {
        let rates = self.up.iter().chain(&self.down);
        let waits = rates.filter(|rate| rate.tokens < QUANTUM);
        waits.map(|rate| rate.ready_at(now)).min().unwrap_or(now)
    }

    /// Bytes that the guest may still send if it has sent `sent`; `None` without a total.
    pub fn left(&self, sent: u64) -> Option<u64> {
        self.total_up.map(|total| total.saturating_sub(sent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_flow_at_their_rate() {
        let start = Instant::now();
        let limits = NetLimits {
            egress_mbit: Some(8),
            egress_mib_total: Some(1),
            ..NetLimits::default()
        };
        let mut limits = ByteLimits::new(&limits, start);
        assert_eq!(
            limits.allowed(Direction::Down, usize::MAX, start),
            usize::MAX
        );
        let mut sent = 0;
        for millis in 0..2000 {
            let now = start + Duration::from_millis(millis);
            let part = limits.allowed(Direction::Up, usize::MAX, now);
            limits.spend(Direction::Up, part);
            sent += part;
            if part == 0 {
                assert!(limits.ready_at(now) > now);
            }
        }
        // A megabyte per second, and one burst of 50 ms.
        assert!((2_000_000..=2_060_000).contains(&sent), "{sent}");
        assert_eq!(limits.left(1 << 19), Some(1 << 19));
        assert_eq!(limits.left(1 << 21), Some(0));
    }

    #[test]
    fn a_bucket_gives_its_rate_and_no_more() {
        let start = Instant::now();
        let mut bucket = Bucket::new(10, start);
        assert_eq!((0..50).filter(|_| bucket.take(start)).count(), 10);
        let later = start + Duration::from_millis(500);
        assert_eq!((0..50).filter(|_| bucket.take(later)).count(), 5);
        let much_later = start + Duration::from_secs(100);
        assert_eq!((0..50).filter(|_| bucket.take(much_later)).count(), 10);
    }
}
