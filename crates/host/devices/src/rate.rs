//! Token buckets on bytes and operations.
//!
//! [`RateLimiter`] delays requests and arms a timer for the next try; `Budget` drops instead. A request larger
//! than the bucket passes when the bucket is full and is paid off afterwards, so none waits for ever.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use forkd_vmm_proto::RateLimit;
use serde::{Deserialize, Serialize};

use crate::TimerFd;

/// The levels of the buckets, as saved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateState {
    /// Bytes that may pass at once; negative when the last one overdrew.
    pub bytes: i64,
    /// Operations that may pass at once.
    pub ops: i64,
}

#[derive(Debug)]
struct Bucket {
    per_second: u64,
    capacity: i64,
    /// May go below zero: a request larger than the bucket passes when the bucket is full and is paid off
    /// afterwards, so that no request is too large to ever pass.
    left: i64,
    /// Time that has not made a whole token yet.
    owed: u128,
}

const NANOS: u128 = 1_000_000_000;

impl Bucket {
    fn new(per_second: u64, burst: u64) -> Option<Self> {
        if per_second == 0 {
            return None;
        }
        let capacity = i64::try_from(burst.max(per_second / 10).max(1)).unwrap_or(i64::MAX);
        Some(Self {
            per_second,
            capacity,
            left: capacity,
            owed: 0,
        })
    }

    fn refill(&mut self, elapsed: Duration) {
        let earned = elapsed
            .as_nanos()
            .saturating_mul(u128::from(self.per_second))
            .saturating_add(self.owed);
        let whole = i64::try_from(earned / NANOS).unwrap_or(i64::MAX);
        self.owed = earned % NANOS;
        self.left = self.left.saturating_add(whole).min(self.capacity);
        if self.left == self.capacity {
            self.owed = 0;
        }
    }

    fn ready(&self) -> bool {
        self.left > 0
    }

    fn take(&mut self, n: u64) {
        self.left = self
            .left
            .saturating_sub(i64::try_from(n).unwrap_or(i64::MAX));
    }

    fn wait(&self) -> Duration {
        if self.ready() {
            return Duration::ZERO;
        }
        let missing = u128::from(self.left.unsigned_abs()) + 1;
        let nanos = missing
            .saturating_mul(NANOS)
            .div_ceil(u128::from(self.per_second));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// A limit for things that are dropped rather than delayed.
#[derive(Debug)]
pub struct Budget {
    bucket: Bucket,
    last: Instant,
}

impl Budget {
    /// A full one; none if there is no limit.
    pub fn new(per_second: u64, burst: u64) -> Option<Self> {
        Some(Self {
            bucket: Bucket::new(per_second, burst)?,
            last: Instant::now(),
        })
    }

    /// Takes `n` if they are there.
    pub fn take(&mut self, n: u64) -> bool {
        if !self.bucket.ready() {
            let now = Instant::now();
            self.bucket.refill(now.saturating_duration_since(self.last));
            self.last = now;
        }
        let ready = self.bucket.ready();
        if ready {
            self.bucket.take(n);
        }
        ready
    }
}

/// A limit on bytes and operations with a timer for the next try.
#[derive(Debug)]
pub struct RateLimiter {
    bytes: Option<Bucket>,
    ops: Option<Bucket>,
    last: Instant,
    timer: Option<TimerFd>,
    armed: bool,
}

impl RateLimiter {
    /// A limiter with full buckets. Without limits it costs nothing.
    pub fn new(limit: RateLimit) -> io::Result<Self> {
        let bytes = Bucket::new(limit.bytes_per_second, limit.burst_bytes);
        let ops = Bucket::new(limit.ops_per_second, limit.burst_ops);
        let timer = if bytes.is_some() || ops.is_some() {
            Some(TimerFd::new()?)
        } else {
            None
        };
        Ok(Self {
            bytes,
            ops,
            last: Instant::now(),
            timer,
            armed: false,
        })
    }

    /// The timer that fires when a refused request may be tried again; none if nothing is limited.
    pub fn timer(&self) -> Option<BorrowedFd<'_>> {
        self.timer.as_ref().map(AsFd::as_fd)
    }

    /// Whether a request may pass now. If not, the timer is armed.
    pub fn ready(&mut self) -> bool {
        self.ready_at(Instant::now())
    }

    fn ready_at(&mut self, now: Instant) -> bool {
        if self.timer.is_none() {
            return true;
        }
        if self.armed {
            return false;
        }
        let elapsed = now.saturating_duration_since(self.last);
        self.last = now;
        let mut wait = Duration::ZERO;
        for bucket in [&mut self.bytes, &mut self.ops].into_iter().flatten() {
            bucket.refill(elapsed);
            wait = wait.max(bucket.wait());
        }
        if wait.is_zero() {
            return true;
        }
        if let Some(timer) = &self.timer {
            // A timer that cannot be armed must not stop the device for ever.
            self.armed = timer.arm(wait).is_ok();
        }
        !self.armed
    }

    /// Pays for a request that has passed.
    pub fn charge(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.take(bytes);
        }
        if let Some(bucket) = &mut self.ops {
            bucket.take(1);
        }
    }

    /// To be called when the timer has fired.
    pub fn on_timer(&mut self) {
        if let Some(timer) = &self.timer {
            timer.take();
        }
        self.armed = false;
    }

    /// The buckets as they are.
    pub fn save(&self) -> RateState {
        RateState {
            bytes: self.bytes.as_ref().map_or(0, |b| b.left),
            ops: self.ops.as_ref().map_or(0, |b| b.left),
        }
    }

    /// Puts saved buckets in place. Limits belong to the new machine, so what is left is cut to them; a
    /// debt larger than a second is forgiven down to one, whatever the state says.
    pub fn restore(&mut self, state: RateState) {
        for (bucket, left) in [(&mut self.bytes, state.bytes), (&mut self.ops, state.ops)] {
            if let Some(bucket) = bucket {
                let floor = -i64::try_from(bucket.per_second).unwrap_or(i64::MAX);
                bucket.left = left.max(floor).min(bucket.capacity);
            }
        }
        self.last = Instant::now();
        self.armed = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(bytes: u64, burst: u64, ops: u64) -> RateLimiter {
        RateLimiter::new(RateLimit {
            bytes_per_second: bytes,
            burst_bytes: burst,
            ops_per_second: ops,
            burst_ops: ops,
        })
        .unwrap()
    }

    #[test]
    fn no_limit_always_passes() {
        let mut limiter = limit(0, 0, 0);
        for _ in 0..1000 {
            assert!(limiter.ready());
            limiter.charge(u64::MAX);
        }
        assert!(limiter.timer().is_none());
    }

    #[test]
    fn the_rate_over_a_second_is_the_limit() {
        let mut limiter = limit(1000, 100, 0);
        let start = limiter.last;
        let mut passed = 0;
        for ms in 0..1000 {
            limiter.on_timer();
            while limiter.ready_at(start + Duration::from_millis(ms)) {
                limiter.charge(10);
                passed += 10;
            }
        }
        assert!((1000..=1110).contains(&passed), "{passed}");
    }

    #[test]
    fn a_request_larger_than_the_bucket_passes_once_and_is_paid_off() {
        let mut limiter = limit(1000, 100, 0);
        let start = limiter.last;
        assert!(limiter.ready_at(start));
        limiter.charge(5000);
        assert!(!limiter.ready_at(start));
        limiter.on_timer();
        assert!(!limiter.ready_at(start + Duration::from_secs(4)));
        limiter.on_timer();
        assert!(limiter.ready_at(start + Duration::from_millis(4901)));
    }

    #[test]
    fn operations_are_limited_apart_from_bytes() {
        let mut limiter = limit(0, 0, 10);
        let start = limiter.last;
        let passed = (0..100)
            .filter(|_| {
                let ready = limiter.ready_at(start);
                if ready {
                    limiter.charge(1 << 40);
                }
                ready
            })
            .count();
        assert_eq!(passed, 10);
    }

    #[test]
    fn hostile_state_neither_blocks_for_ever_nor_gives_more_than_the_burst() {
        let mut limiter = limit(1000, 100, 10);
        limiter.restore(RateState {
            bytes: i64::MIN,
            ops: i64::MAX,
        });
        let saved = limiter.save();
        assert_eq!((saved.bytes, saved.ops), (-1000, 10));
        assert!(limiter.ready_at(limiter.last + Duration::from_secs(2)));
    }
}
