//! How many shells stand ready: as many as recent bursts needed.
//!
//! A burst is a number of children that start at the same time, of one request or of several. [`Demand`] remembers the
//! largest of the last minutes. Shells are made when no child starts any more, because making them competes with the
//! children for the processors.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// How long a burst counts.
const REMEMBERED: Duration = Duration::from_secs(10 * 60);
/// The most shells that demand asks for. One takes about 1.5 MiB.
const MOST: u32 = 128;

/// The children that start, and the bursts of the last minutes.
#[derive(Debug, Default)]
pub struct Demand {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    starting: u32,
    /// When each burst was, and its size. A burst that is smaller than a later one is not in it.
    bursts: VecDeque<(Instant, u32)>,
}

impl Demand {
    /// So many children start.
    pub fn begin(&self, count: u32, now: Instant) {
        let mut inner = self.lock();
        inner.starting = inner.starting.saturating_add(count);
        let size = inner.starting;
        while inner.bursts.back().is_some_and(|(_, last)| *last <= size) {
            inner.bursts.pop_back();
        }
        inner.bursts.push_back((now, size));
    }

    /// So many children have started or failed. True if no other child starts.
    pub fn end(&self, count: u32) -> bool {
        let mut inner = self.lock();
        inner.starting = inner.starting.saturating_sub(count);
        inner.starting == 0
    }

    /// How many shells should stand ready, at least `least`: a quarter more than the largest burst took.
    pub fn depth(&self, least: u32, now: Instant) -> u32 {
        let mut inner = self.lock();
        while inner
            .bursts
            .front()
            .is_some_and(|(at, _)| now.saturating_duration_since(*at) > REMEMBERED)
        {
            inner.bursts.pop_front();
        }
        let largest = inner.bursts.front().map_or(0, |(_, size)| *size);
        let wanted = largest.saturating_add(largest.div_ceil(4));
        wanted.min(MOST).max(least)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_follows_the_largest_burst_of_the_last_minutes() {
        let demand = Demand::default();
        let start = Instant::now();
        assert_eq!(demand.depth(8, start), 8);
        demand.begin(10, start);
        demand.begin(2, start);
        assert!(!demand.end(10));
        assert!(demand.end(2));
        assert_eq!(demand.depth(8, start), 15, "twelve at once and a quarter");
        let later = start + REMEMBERED / 2;
        demand.begin(9, later);
        assert!(demand.end(9));
        assert_eq!(demand.depth(8, later), 15);
        let gone = start + REMEMBERED + Duration::from_secs(1);
        assert_eq!(demand.depth(8, gone), 12, "the smaller burst is left");
        assert_eq!(demand.depth(8, later + 2 * REMEMBERED), 8);
        demand.begin(5_000, later);
        assert_eq!(demand.depth(8, later), MOST);
        assert_eq!(
            demand.depth(500, later),
            500,
            "an operator may ask for more"
        );
    }
}
