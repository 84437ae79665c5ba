//! The results of `branch`, as text and as JSON.
//!
//! [`Conditions`] carries the definition of each clock, so that a number never stands without it.

use std::fmt::Write as _;
use std::time::Duration;

use forkd_types::MiB;
use serde::Serialize;

use super::Times;
use crate::output::Findings;
use crate::report::Host;
use crate::stats::Spread;

/// The results of `branch`.
#[derive(Debug, Serialize)]
pub struct Report {
    /// In the order of the arguments.
    pub branch: Vec<Branch>,
    pub conditions: Conditions,
}

/// Results for one source size and one amount of change.
#[derive(Debug, Serialize)]
pub struct Branch {
    /// Memory of the source.
    pub mib: u32,
    /// Memory that changed since the previous branch.
    pub dirty_mib: u32,
    /// The pause as seen by the guest.
    pub guest_gap_ms: Spread,
    /// The same period without a branch.
    pub quiet_gap_ms: Spread,
    /// The pause as seen by the host.
    pub host_pause_ms: Spread,
    /// Until the source runs again.
    pub source_runs_ms: Spread,
    /// Until the snapshot is durable.
    pub durable_ms: Spread,
    /// Until a child answers.
    pub child_answers_ms: Spread,
    /// Until a child of a live fork answers.
    pub fork_answers_ms: Spread,
    /// Memory that a snapshot stores itself, median.
    pub written_mib: f64,
}

impl Branch {
    /// Summarises several branches.
    pub fn of(memory: MiB, dirty: MiB, all: &[Times]) -> Self {
        let spread = |part: fn(&Times) -> Duration| {
            let times: Vec<Duration> = all.iter().map(part).collect();
            Spread::of(&times)
        };
        let mut written: Vec<u64> = all.iter().map(|times| times.written).collect();
        written.sort_unstable();
        let median = written.get(written.len().saturating_sub(1) / 2);
        Self {
            mib: memory.0,
            dirty_mib: dirty.0,
            guest_gap_ms: spread(|times| times.guest_gap),
            quiet_gap_ms: spread(|times| times.quiet_gap),
            host_pause_ms: spread(|times| times.host_pause),
            source_runs_ms: spread(|times| times.source_runs),
            durable_ms: spread(|times| times.durable),
            child_answers_ms: spread(|times| times.child_answers),
            fork_answers_ms: spread(|times| times.fork_answers),
            written_mib: median.copied().unwrap_or(0) as f64 / f64::from(1 << 20),
        }
    }
}

/// Host, repetitions and definitions of a run.
#[derive(Debug, Serialize)]
pub struct Conditions {
    #[serde(flatten)]
    pub host: Host,
    /// Branches per kind.
    pub rounds: usize,
    /// The processes in the source were frozen for each cut.
    pub freeze: bool,
    /// Definition of each clock.
    pub clock: &'static str,
}

impl Conditions {
    /// The conditions and definitions of this program.
    pub fn new(host: Host, rounds: usize, freeze: bool) -> Self {
        Self {
            host,
            rounds,
            freeze,
            clock: "through the daemon's REST API, one source of 1 vCPU, every page of the dirty set changed before \
                    each branch; guest gap: the longest time between two looks at CLOCK_MONOTONIC of a process that \
                    does nothing else, in the two seconds around the cut, what other processes of the guest and the \
                    writing take from its processor included; quiet gap: the same over as long a time without a branch; \
                    host pause: from the first vCPU stopped to the last one running again; source, child, durable: from sending the request \
                    until it was answered, a child started when the snapshot was durable had answered, the \
                    event of the durable snapshot came; child of a fork: from sending the request to fork the source, as \
                    much changed, until it was answered, which is when the child has answered",
        }
    }
}

impl Findings for Report {
    fn text(&self) -> String {
        let c = &self.conditions;
        let mut text = format!("{}, {} branches in a row", c.host.line(), c.rounds);
        text.push_str(match c.freeze {
            true => ", processes frozen for each cut\n\n",
            false => "\n\n",
        });
        let _ = writeln!(text, "{:<32} {:>9} {:>9} {:>9}", "ms", "p50", "p99", "max");
        for branch in &self.branch {
            let _ = writeln!(
                text,
                "{} MiB, {} MiB dirty, {:.1} MiB written",
                branch.mib, branch.dirty_mib, branch.written_mib
            );
            for (what, ms) in [
                ("pause, guest", &branch.guest_gap_ms),
                ("  (gap without a branch)", &branch.quiet_gap_ms),
                ("pause, host", &branch.host_pause_ms),
                ("source runs", &branch.source_runs_ms),
                ("snapshot durable", &branch.durable_ms),
                ("child answers", &branch.child_answers_ms),
                ("child of a fork answers", &branch.fork_answers_ms),
            ] {
                text.push_str(&ms.line(what));
            }
        }
        let _ = writeln!(text, "\nclock: {}", c.clock);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_clock_keeps_its_name() {
        let times = |n: u64| Times {
            guest_gap: Duration::from_millis(n),
            quiet_gap: Duration::from_millis(2 * n),
            host_pause: Duration::from_millis(3 * n),
            source_runs: Duration::from_millis(4 * n),
            durable: Duration::from_millis(5 * n),
            child_answers: Duration::from_millis(6 * n),
            fork_answers: Duration::from_millis(7 * n),
            written: n << 20,
        };
        let all: Vec<Times> = (1..=10).map(times).collect();
        let branch = Branch::of(MiB(512), MiB(8), &all);
        assert_eq!(branch.guest_gap_ms.p50, 5.0);
        assert_eq!(branch.quiet_gap_ms.p50, 10.0);
        assert_eq!(branch.host_pause_ms.max, 30.0);
        assert_eq!(branch.source_runs_ms.p50, 20.0);
        assert_eq!(branch.durable_ms.p99, 50.0);
        assert_eq!(branch.child_answers_ms.p50, 30.0);
        assert_eq!(branch.fork_answers_ms.p50, 35.0);
        assert_eq!(branch.written_mib, 5.0);
    }

    #[test]
    fn none_is_no_failure() {
        assert_eq!(Branch::of(MiB(512), MiB(8), &[]).written_mib, 0.0);
    }
}
