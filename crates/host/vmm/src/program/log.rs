//! The VMM's log: one line per event on standard error, at a bounded rate.
//!
//! Many lines are caused by the guest, and standard error is shared with other programs of the service.
//! Two measures keep a guest from flooding it:
//! - records of the `log` crate, which dependencies write, are not forwarded;
//! - `LineBudget` drops lines beyond a rate and reports how many.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing_subscriber::fmt::MakeWriter;

/// Lines that may follow one another at once.
const BURST: u32 = 100;
/// One more line may be written after each of these periods.
const PERIOD: Duration = Duration::from_secs(1);

/// A token bucket of log lines. The number of dropped lines precedes the next line that passes.
#[derive(Debug)]
struct LineBudget {
    left: u32,
    /// When the last token was added.
    refilled: Instant,
    dropped: u64,
}

impl LineBudget {
    fn new(now: Instant) -> Self {
        Self {
            left: BURST,
            refilled: now,
            dropped: 0,
        }
    }

    /// Takes a token; returns how many lines were dropped before this one, or `None` to drop this one.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let elapsed = now.saturating_duration_since(self.refilled);
        let earned = elapsed.as_nanos() / PERIOD.as_nanos();
        if let Ok(earned @ 1..) = u32::try_from(earned) {
            self.left = self.left.saturating_add(earned).min(BURST);
            self.refilled = now;
        }
        let Some(left) = self.left.checked_sub(1) else {
            self.dropped += 1;
            return None;
        };
        self.left = left;
        Some(std::mem::take(&mut self.dropped))
    }
}

/// Standard error behind a `LineBudget`.
struct BoundedStderr(Mutex<LineBudget>);

/// One line: written, or dropped.
struct Line(Option<io::Stderr>);

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Some(stderr) => stderr.write(bytes),
            None => Ok(bytes.len()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Some(stderr) => stderr.flush(),
            None => Ok(()),
        }
    }
}

impl<'a> MakeWriter<'a> for BoundedStderr {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        let mut budget = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(dropped) = budget.take(Instant::now()) else {
            return Line(None);
        };
        let mut stderr = io::stderr();
        if dropped > 0 {
            // A log that cannot be written has no other place to report it.
            let _ = writeln!(stderr, "forkd-vmm: {dropped} log lines were dropped");
        }
        Line(Some(stderr))
    }
}

/// Starts the log. A second call, as in tests, changes nothing.
pub fn init() {
    let lines = tracing_subscriber::fmt()
        .with_writer(BoundedStderr(Mutex::new(LineBudget::new(Instant::now()))))
        .with_max_level(tracing::Level::INFO)
        .with_ansi(false)
        .with_target(false)
        // It would print, and panic, where the line itself could not be written: on a full disk.
        .log_internal_errors(false)
        .finish();
    // Not `try_init`, which would forward the records of the `log` crate as well.
    let _ = tracing::subscriber::set_global_default(lines);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_lines_is_dropped_and_counted() {
        let start = Instant::now();
        let mut budget = LineBudget::new(start);
        let passed = (0..10_000).filter(|_| budget.take(start).is_some()).count();
        assert_eq!(passed, BURST as usize);
        let later = start + PERIOD;
        assert_eq!(budget.take(later), Some(10_000 - u64::from(BURST)));
        assert_eq!(budget.take(later), None);
        assert_eq!(budget.take(later + PERIOD), Some(1));
        let idle = later + PERIOD * (10 * BURST);
        let passed = (0..10_000).filter(|_| budget.take(idle).is_some()).count();
        assert_eq!(
            passed, BURST as usize,
            "an idle time earns no more than a burst"
        );
    }

    #[test]
    fn records_of_the_log_crate_are_not_forwarded() {
        init();
        assert_eq!(log::max_level(), log::LevelFilter::Off);
    }
}
