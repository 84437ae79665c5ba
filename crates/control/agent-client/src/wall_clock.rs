//! The wall clock of a guest that slept.
//!
//! A time that is sent is late by the way of its message, and the first message to a child waits for the
//! pages of half the guest. So the clock is set once, then read back and moved by the difference: a move is
//! right however long its message takes, and readings bound how far the clock is off by the ways of their messages.
//!
//! A child that wakes up ([`Client::wake_vsock`]) is not kept waiting for the readings. The answer to its identity bounds
//! the error, and a move by that error is sent before any other request can be: the agent carries requests out in the
//! order of their arrival. Readings follow in the background if the bound is not close enough.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forkd_guest_proto::{ClockRequest, ClockState, IdentityReport, IdentityRequest, Request};

use crate::stream::Stream;
use crate::{Calls, Client, ConnectError, Deadline, Error, Options};

/// How often the clock is read. Once is enough where messages are fast.
const READINGS: usize = 6;
/// How often the clock of a child that is in use already is read.
const READINGS_IN_USE: usize = 3;
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

impl Client {
    /// Connects to the agent of a child that has just been started, and makes the child a machine of its own with the
    /// time of this host: one write, one answer. The outer error is that of the connection.
    pub async fn wake_vsock(
        path: &Path,
        port: u32,
        options: Options,
        request: IdentityRequest,
        deadline: Deadline,
    ) -> Result<(Self, Result<Identified, Error>), ConnectError> {
        let before = now();
        let unix_ns = Some(before);
        let request = Request::Identity(Box::new(IdentityRequest { unix_ns, ..request }));
        let (client, answer) = Self::connect_vsock_asking(path, port, options, &request).await?;
        let report: Result<IdentityReport, Error> = deadline.bound(answer.response()).await;
        let identified = match report {
            Ok(report) => client.by(deadline).settle_clock(report, before, now()),
            Err(error) => Err(error),
        };
        Ok((client, identified))
    }
}

impl Calls {
    /// Corrects the clock from the answer to an identity that was sent at `before` and came at `after`.
    fn settle_clock(
        &self,
        report: IdentityReport,
        before: i64,
        after: i64,
    ) -> Result<Identified, Error> {
        let (Some(_), Some(guest)) = (report.clock_step_ns, report.unix_ns) else {
            return Ok(Identified {
                report,
                clock_within: None,
            });
        };
        let mut estimate = Estimate::of_answer(before, &report, guest, after);
        // Nearly all of the time went into the way there: the guest had to load the pages that it needs.
        let wanted = estimate.highest;
        let sent = now();
        let first = self.open(&Request::Clock(shift(estimate.move_to(wanted))))?;
        let clock_within = Some(within(estimate.off_at_most()));
        let calls = self.clone();
        tokio::spawn(async move {
            // A guest that does not answer is noticed by the next request.
            let _ = calls.finish_clock(first, sent, estimate).await;
        });
        Ok(Identified {
            report,
            clock_within,
        })
    }

    /// Reads the clock until it is close. `first` is a reading that was sent at `sent`.
    async fn finish_clock(
        &self,
        first: Stream,
        sent: i64,
        mut estimate: Estimate,
    ) -> Result<(), Error> {
        let state: ClockState = self.deadline().bound(first.response()).await?;
        if estimate.off_at_most() <= CLOSE_NS {
            return Ok(());
        }
        estimate.read(sent, state.unix_ns, now());
        let wanted = estimate.middle();
        self.read_until_close(estimate, wanted, READINGS_IN_USE)
            .await
            .map(drop)
    }

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
        let estimate = Estimate::until(guest, after);
        let wanted = estimate.highest;
        self.read_until_close(estimate, wanted, READINGS).await
    }

    async fn read_until_close(
        &self,
        mut estimate: Estimate,
        mut wanted: i64,
        readings: usize,
    ) -> Result<Duration, Error> {
        for _ in 0..readings {
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

    /// An identity that was sent at `before` was answered at `after`. The clock said `guest` at the end of the guest's
    /// work, so the time of that work lies before the reading. A time that cannot be is not believed.
    fn of_answer(before: i64, report: &IdentityReport, guest: i64, after: i64) -> Self {
        let all = after.saturating_sub(before);
        let worked = i64::try_from(report.took_us)
            .ok()
            .and_then(|us| us.checked_mul(1000))
            .filter(|worked| *worked <= all)
            .unwrap_or(0);
        let mut estimate = Self::until(guest, after);
        estimate.read(before.saturating_add(worked), guest, after);
        estimate
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
    fn the_answer_to_an_identity_bounds_the_clock() {
        let report = |took_ms: i64| IdentityReport {
            took_us: took_ms.unsigned_abs() * 1000,
            ..IdentityReport::default()
        };
        // 40 ms there, 8 ms of work, 2 ms back: the clock was set to the time of the sending.
        let before = 1_000_000 * MS;
        let guest = before + 8 * MS;
        let after = before + 50 * MS;
        let mut estimate = Estimate::of_answer(before, &report(8), guest, after);
        assert_eq!((estimate.lowest, estimate.highest), (0, 42 * MS));
        let wanted = estimate.highest;
        estimate.move_to(wanted);
        let off = guest + estimate.moved - (before + 48 * MS);
        assert!(off.abs() <= estimate.off_at_most(), "{off}");
        // More work than there was time for.
        let lied = Estimate::of_answer(before, &report(51), guest, after);
        assert_eq!(lied.lowest, -8 * MS);
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
