//! The wall clock of a guest that slept.
//!
//! A time that is sent is late by the way of its message, and the first message to a child waits for the
//! pages of half the guest. So the clock is set once, then read back and moved by the difference: a move is
//! right however long its message takes, and readings bound how far the clock is off by the ways of their messages.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forkd_guest_proto::{ClockRequest, IdentityReport, IdentityRequest};

use crate::{Calls, Error};

/// How often the clock is read. Once is enough where messages are fast.
const READINGS: usize = 6;
/// The error of a clock above which it is read once more, nanoseconds.
const CLOSE_NS: i64 = 3_000_000;

/// A guest with an identity of its own.
#[derive(Debug)]
pub struct Identified {
    /// The agent's report.
    pub report: IdentityReport,
    /// The guest's wall clock differs from ours by at most this; nothing when it could not be set.
    pub clock_within: Option<Duration>,
}

impl Calls {
    /// Makes a child a machine of its own, with the time of this host. The deadline is that of all steps together.
    pub async fn identify(&self, request: IdentityRequest) -> Result<Identified, Error> {
        self.by(self.deadline()).identify_by(request).await
    }

    async fn identify_by(&self, request: IdentityRequest) -> Result<Identified, Error> {
        let unix_ns = Some(now());
        let report = self
            .identity(IdentityRequest { unix_ns, ..request })
            .await?;
        let clock_within = match (report.clock_step_ns, report.unix_ns) {
            (Some(_), Some(guest)) => Some(self.correct_clock(guest, now()).await?),
            _ => None,
        };
        Ok(Identified {
            report,
            clock_within,
        })
    }

    /// Moves the guest's clock to ours. It said `guest` some time before `after`.
    async fn correct_clock(&self, guest: i64, after: i64) -> Result<Duration, Error> {
        let mut estimate = Estimate::until(guest, after);
        let mut wanted = estimate.highest;
        for _ in 0..READINGS {
            let before = now();
            let guest = self.clock(shift(estimate.move_to(wanted))).await?.unix_ns;
            estimate.read(before, guest, now());
            wanted = estimate.middle();
            if estimate.off_at_most() <= CLOSE_NS {
                return Ok(within(estimate.off_at_most()));
            }
        }
        self.clock(shift(estimate.move_to(wanted))).await?;
        Ok(within(estimate.off_at_most()))
    }
}

/// How far the guest's clock was behind ours when it was first read.
///
/// Every reading bounds it from both sides, by the way there and by the way back. The bounds of different readings
/// belong together: the quickest way there and the quickest way back need not be of the same one.
struct Estimate {
    lowest: i64,
    highest: i64,
    /// How far the clock has been moved since.
    moved: i64,
}

impl Estimate {
    /// The clock said `guest` some time before `after`.
    fn until(guest: i64, after: i64) -> Self {
        Self {
            lowest: i64::MIN,
            highest: after.saturating_sub(guest),
            moved: 0,
        }
    }

    /// The clock said `guest` between `before` and `after`.
    fn read(&mut self, before: i64, guest: i64, after: i64) {
        let unmoved = guest.saturating_sub(self.moved);
        self.lowest = self.lowest.max(before.saturating_sub(unmoved));
        self.highest = self.highest.min(after.saturating_sub(unmoved));
    }

    fn middle(&self) -> i64 {
        self.lowest.midpoint(self.highest)
    }

    /// The step that moves the clock so far in all.
    fn move_to(&mut self, wanted: i64) -> i64 {
        let step = wanted.saturating_sub(self.moved);
        self.moved = wanted;
        step
    }

    /// How far the clock is off at most, where it stands now.
    fn off_at_most(&self) -> i64 {
        let over = self.moved.saturating_sub(self.lowest);
        let under = self.highest.saturating_sub(self.moved);
        over.max(under).max(0)
    }
}

fn shift(correction: i64) -> ClockRequest {
    ClockRequest {
        shift_ns: Some(correction),
        ..Default::default()
    }
}

fn within(nanoseconds: i64) -> Duration {
    Duration::from_nanos(nanoseconds.unsigned_abs())
}

/// The wall clock, nanoseconds since the epoch.
fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |now| i64::try_from(now.as_nanos()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: i64 = 1_000_000;

    #[test]
    fn a_clock_that_is_read_and_moved_is_within_what_is_said() {
        // The way to the guest, the way back, both milliseconds.
        let ways = [(35, 5), (60, 90), (9, 30), (40, 1)];
        let mut host = 1_000_000 * MS;
        let mut off = -567 * MS;
        let guest = host - 20 * MS + off;
        let mut estimate = Estimate::until(guest, host);
        let mut wanted = estimate.highest;
        for (there, back) in ways {
            let before = host;
            off += estimate.move_to(wanted);
            let guest = before + there * MS + off;
            host += (there + back) * MS;
            estimate.read(before, guest, host);
            assert!(off.abs() <= estimate.off_at_most(), "{off}");
            wanted = estimate.middle();
        }
        off += estimate.move_to(wanted);
        assert!(off.abs() <= estimate.off_at_most());
        // Nine milliseconds there at best, one back.
        assert_eq!(estimate.off_at_most(), 5 * MS);
    }

    #[test]
    fn a_guest_that_lies_gets_a_number() {
        let values = [i64::MIN, -1, 0, i64::MAX];
        for first in values {
            for second in values {
                let mut estimate = Estimate::until(first, i64::MAX);
                let wanted = estimate.highest;
                estimate.move_to(wanted);
                estimate.read(0, second, i64::MAX);
                let wanted = estimate.middle();
                estimate.move_to(wanted);
                assert!(estimate.off_at_most() >= 0);
            }
        }
    }
}
