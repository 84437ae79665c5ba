//! How many requests each actor may make.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A bucket of tokens for each actor: one a request, filled at the rate, two seconds deep.
#[derive(Debug)]
pub struct Rates {
    per_second: f64,
    buckets: Mutex<HashMap<String, (f64, Instant)>>,
}

impl Rates {
    /// 0 is no limit.
    pub fn new(per_second: u32) -> Self {
        Self {
            per_second: f64::from(per_second),
            buckets: Mutex::default(),
        }
    }

    /// Takes one; `false` if there is none.
    pub fn take(&self, actor: &str) -> bool {
        self.take_at(actor, Instant::now())
    }

    fn take_at(&self, actor: &str, now: Instant) -> bool {
        if self.per_second == 0.0 {
            return true;
        }
        let depth = self.per_second * 2.0;
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let (level, last) = buckets.entry(actor.to_owned()).or_insert((depth, now));
        let passed = now.saturating_duration_since(*last).as_secs_f64();
        *level = (*level + passed * self.per_second).min(depth);
        *last = now;
        if *level < 1.0 {
            return false;
        }
        *level -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_burst_then_the_rate_and_each_for_himself() {
        let rates = Rates::new(10);
        let start = Instant::now();
        let taken = (0..100).filter(|_| rates.take_at("a", start)).count();
        assert_eq!(taken, 20);
        assert!(rates.take_at("b", start));
        let later = start + Duration::from_millis(500);
        assert_eq!((0..100).filter(|_| rates.take_at("a", later)).count(), 5);
        assert!((0..1000).all(|_| Rates::new(0).take_at("a", start)));
    }
}
