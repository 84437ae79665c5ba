//! The wall clock of a guest that slept.
//!
//! A time that is sent is late by the way of its message, and the first message to a child waits for the
//! pages of half the guest. So the clock is set once, then read back and moved by the difference: a move is
//! right however long its message takes, and a reading is off by at most half its round trip.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forkd_guest_proto::{ClockRequest, IdentityReport, IdentityRequest};

use crate::{Client, Error};

/// How often the clock is read. Once is enough where messages are fast.
const READINGS: usize = 6;
/// What a clock may be off at most before it is read once more.
const CLOSE_NS: i64 = 3_000_000;

/// A guest with an identity of its own.
#[derive(Debug)]
pub struct Identified {
    /// What the agent did.
    pub report: IdentityReport,
    /// The guest's wall clock differs from ours by at most this; nothing when it could not be set.
    pub clock_within: Option<Duration>,
}

impl Client {
    /// Makes a fork a machine of its own, with the time of this host.
    pub async fn identify(&self, request: IdentityRequest) -> Result<Identified, Error> {
        let unix_ns = Some(now());
        let report = self
            .identity(IdentityRequest { unix_ns, ..request })
            .await?;
        let clock_within = match (report.clock_step_ns, report.unix_ns) {
            (Some(_), Some(guest)) => Some(self.correct_clock(now().saturating_sub(guest)).await?),
            _ => None,
        };
        Ok(Identified {
            report,
            clock_within,
        })
    }

    /// Moves the guest's clock by `correction`, then by what its readings ask for.
    async fn correct_clock(&self, mut correction: i64) -> Result<Duration, Error> {
        let mut estimate = Estimate::default();
        for _ in 0..READINGS {
            let before = now();
            let guest = self.clock(shift(correction)).await?.unix_ns;
            let after = now();
            correction = estimate.correction(before, guest, after);
            if estimate.off_at_most(correction) <= CLOSE_NS {
                return Ok(within(estimate.off_at_most(correction)));
            }
        }
        if correction != 0 {
            self.clock(shift(correction)).await?;
        }
        Ok(within(estimate.off_at_most(0)))
    }
}

/// How sharp the sharpest reading was.
struct Estimate {
    uncertainty: i64,
}

impl Default for Estimate {
    fn default() -> Self {
        Self {
            uncertainty: i64::MAX,
        }
    }
}

impl Estimate {
    /// What a reading asks for: the guest's clock said `guest` between `before` and `after`. Nothing when
    /// an earlier one was sharper.
    fn correction(&mut self, before: i64, guest: i64, after: i64) -> i64 {
        let uncertainty = after.saturating_sub(before).max(0) / 2;
        if uncertainty >= self.uncertainty {
            return 0;
        }
        self.uncertainty = uncertainty;
        before.saturating_add(uncertainty).saturating_sub(guest)
    }

    /// How far a clock can be off that needs this correction and does not get it.
    fn off_at_most(&self, correction: i64) -> i64 {
        self.uncertainty.saturating_add(correction.saturating_abs())
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
        let ways = [(400, 20), (35, 5), (60, 90), (9, 1), (2, 1)];
        let mut host = 1_000_000 * MS;
        let mut off = -567 * MS;
        let mut estimate = Estimate::default();
        let mut correction = 0;
        for (there, back) in ways {
            let before = host;
            off += correction;
            let guest = before + there * MS + off;
            host += (there + back) * MS;
            correction = estimate.correction(before, guest, host);
            assert!(off.abs() <= estimate.off_at_most(correction));
        }
        off += correction;
        assert!(off.abs() <= estimate.off_at_most(0));
        assert!(off.abs() <= 3 * MS / 2, "{off}");
    }

    #[test]
    fn a_guest_that_lies_gets_a_number() {
        for guest in [i64::MIN, -1, 0, i64::MAX] {
            let mut estimate = Estimate::default();
            let correction = estimate.correction(0, guest, i64::MAX);
            assert!(estimate.off_at_most(correction) >= 0);
        }
    }
}
