//! Deadlines of measurements.
//!
//! A machine with the instruction clock hangs about one guest in 150 (see `docs/guides/machine.md`). A hung
//! guest executes few instructions, so that the machine's time almost stands still. The deadline is therefore
//! one of the host's time too, which the machine's real-time clock shows.

use std::future::Future;
use std::time::Duration;

use anyhow::bail;

use crate::report::Host;

/// Seconds since the epoch by the real-time clock. QEMU shows the host's time there, whatever clock the CPU
/// has.
const RTC: &str = "/sys/class/rtc/rtc0/since_epoch";
/// Interval of looks at the real-time clock.
const LOOK: Duration = Duration::from_millis(100);

/// The time that one measurement may take.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    limit: Duration,
    /// Limit by the real-time clock.
    by_rtc: bool,
}

impl Deadline {
    /// The deadline of one operation on this host.
    pub fn of(host: &Host) -> Self {
        if host.counts_instructions() {
            Self {
                limit: Duration::from_secs(150),
                by_rtc: true,
            }
        } else {
            Self {
                limit: Duration::from_secs(300),
                by_rtc: false,
            }
        }
    }

    /// This deadline so many times.
    pub fn times(self, n: u32) -> Self {
        Self {
            limit: self.limit * n,
            ..self
        }
    }

    /// Runs the work. Fails if the work takes longer.
    pub async fn within<T>(
        self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        tokio::select! {
            done = work => done,
            () = self.passed() => bail!("no answer within {} s", self.limit.as_secs()),
        }
    }

    async fn passed(self) {
        let Some(begun) = rtc().filter(|_| self.by_rtc) else {
            return tokio::time::sleep(self.limit).await;
        };
        while rtc().is_none_or(|now| now.saturating_sub(begun) < self.limit.as_secs()) {
            tokio::time::sleep(LOOK).await;
        }
    }
}

fn rtc() -> Option<u64> {
    std::fs::read_to_string(RTC).ok()?.trim().parse().ok()
}
