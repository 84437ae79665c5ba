//! A limit on a rate, as a bucket of tokens that fills with time.

use std::time::Instant;

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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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
