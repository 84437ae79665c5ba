//! Limits per owner.
//!
//! [`Rates`] limits the requests of an owner in a second, by a token bucket. [`Slots`] limits the requests in flight,
//! in total and for each key; a slot is free again when its [`Slot`] is dropped.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

/// A token bucket for each owner: one token a request, refilled at the rate, two seconds deep.
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

    /// Takes one token; `false` if the owner has none left.
    pub fn take(&self, owner: &str) -> bool {
        self.take_at(owner, Instant::now())
    }

    fn take_at(&self, owner: &str, now: Instant) -> bool {
        if self.per_second == 0.0 {
            return true;
        }
        let depth = self.per_second * 2.0;
        let mut buckets = self.buckets.lock();
        let (level, last) = buckets.entry(owner.to_owned()).or_insert((depth, now));
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

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// All slots are taken.
    All,
    /// The key has taken its share.
    Share,
}

/// Slots with a share for each key. Only keys with slots in use are remembered.
#[derive(Debug)]
pub struct Slots {
    total: usize,
    share: usize,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    total: usize,
    by_key: HashMap<String, usize>,
}

impl Slots {
    /// `total` slots, of which one key takes at most `share`.
    pub fn new(total: usize, share: usize) -> Arc<Self> {
        Arc::new(Self {
            total,
            share,
            used: Mutex::default(),
        })
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock()
    }

    /// Takes a slot until the answer is dropped.
    pub fn take(self: &Arc<Self>, key: &str) -> Result<Slot, Full> {
        let mut used = self.used();
        if used.total >= self.total {
            return Err(Full::All);
        }
        let count = used.by_key.get(key).copied().unwrap_or(0);
        if count >= self.share {
            return Err(Full::Share);
        }
        used.total += 1;
        used.by_key.insert(key.to_owned(), count + 1);
        drop(used);
        Ok(Slot {
            slots: Arc::clone(self),
            key: key.to_owned(),
        })
    }
}

/// A slot in use.
#[derive(Debug)]
pub struct Slot {
    slots: Arc<Slots>,
    key: String,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut used = self.slots.used();
        used.total -= 1;
        if let Some(count) = used.by_key.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                used.by_key.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_burst_then_the_rate_and_a_bucket_per_owner() {
        let rates = Rates::new(10);
        let start = Instant::now();
        let taken = (0..100).filter(|_| rates.take_at("a", start)).count();
        assert_eq!(taken, 20);
        assert!(rates.take_at("b", start));
        let later = start + Duration::from_millis(500);
        assert_eq!((0..100).filter(|_| rates.take_at("a", later)).count(), 5);
        assert!((0..1000).all(|_| Rates::new(0).take_at("a", start)));
    }

    #[test]
    fn one_owner_leaves_slots_for_others() {
        let slots = Slots::new(3, 2);
        let mine: Vec<_> = (0..2).map(|_| slots.take("a").unwrap()).collect();
        assert_eq!(slots.take("a").unwrap_err(), Full::Share);
        let other = slots.take("b").unwrap();
        assert_eq!(slots.take("c").unwrap_err(), Full::All);
        drop((mine, other));
        assert!(slots.used().by_key.is_empty());
        assert!(slots.take("c").is_ok());
    }
}
