//! A rate limit for log lines that a guest can cause, per source of lines.

use std::time::{Duration, Instant};

const BURST: u32 = 8;
const EVERY: Duration = Duration::from_secs(5);

/// Lets a burst through, then one message for each period, and counts the rest.
#[derive(Debug)]
pub(crate) struct LogLimit {
    left: u32,
    since: Instant,
    dropped: u64,
}

impl LogLimit {
    pub(crate) fn new() -> Self {
        Self {
            left: BURST,
            since: Instant::now(),
            dropped: 0,
        }
    }

    /// Whether to log now; if so, how many messages were swallowed before this one.
    pub(crate) fn pass(&mut self) -> Option<u64> {
        self.pass_at(Instant::now())
    }

    fn pass_at(&mut self, now: Instant) -> Option<u64> {
        let periods = now.saturating_duration_since(self.since).as_secs() / EVERY.as_secs();
        if periods > 0 {
            self.since = now;
            let earned = u32::try_from(periods).unwrap_or(BURST);
            self.left = self.left.saturating_add(earned).min(BURST);
        }
        if self.left == 0 {
            self.dropped += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.dropped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let mut limit = LogLimit::new();
        let start = limit.since;
        let passed = (0..1000).filter(|_| limit.pass_at(start).is_some()).count();
        assert_eq!(passed, BURST as usize);
        assert_eq!(limit.pass_at(start + EVERY), Some(1000 - u64::from(BURST)));
        assert_eq!(limit.pass_at(start + EVERY), None);
    }
}
