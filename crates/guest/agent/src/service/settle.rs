//! Waits until the processors of the guest have little to do.

use std::time::{Duration, Instant};

use forkd_guest_proto::{AgentError, CpuMetrics, SettleReport, SettleRequest};
use tokio::time::sleep;

use crate::error;
use crate::metrics;

/// The kernel counts processor time in hundredths of a second: a shorter window says nothing.
const MIN_WINDOW: u64 = 50;
const MAX_WINDOW: u64 = 60_000;

/// Returns when the guest was calm for a whole window, or when the time is over.
pub async fn settle(request: SettleRequest) -> Result<SettleReport, AgentError> {
    if !(MIN_WINDOW..=MAX_WINDOW).contains(&request.for_ms) {
        return Err(error::bad(format!(
            "the window has {MIN_WINDOW} to {MAX_WINDOW} milliseconds"
        )));
    }
    let start = Instant::now();
    let limit = Duration::from_millis(request.timeout_ms);
    let mut before = metrics::cpu();
    loop {
        sleep(Duration::from_millis(request.for_ms)).await;
        let now = metrics::cpu();
        let busy = busy_percent(&before, &now);
        let calm = busy <= request.busy_percent;
        if calm || start.elapsed() >= limit {
            return Ok(SettleReport {
                calm,
                busy_percent: busy,
                took_ms: u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
            });
        }
        before = now;
    }
}

/// The share of processor time between two readings that was not idle.
fn busy_percent(before: &CpuMetrics, now: &CpuMetrics) -> u8 {
    let busy = |cpu: &CpuMetrics| cpu.user_ms + cpu.system_ms + cpu.steal_ms;
    let idle = |cpu: &CpuMetrics| cpu.idle_ms + cpu.iowait_ms;
    let worked = busy(now).saturating_sub(busy(before));
    let rested = idle(now).saturating_sub(idle(before));
    match worked + rested {
        // Nothing was counted: the guest did not even take a timer interrupt.
        0 => 0,
        all => u8::try_from(worked * 100 / all).unwrap_or(100),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_that_of_the_window() {
        let cpu = |user_ms, idle_ms| CpuMetrics {
            user_ms,
            idle_ms,
            ..CpuMetrics::default()
        };
        assert_eq!(busy_percent(&cpu(100, 900), &cpu(110, 1090)), 5);
        assert_eq!(busy_percent(&cpu(100, 900), &cpu(300, 900)), 100);
        assert_eq!(busy_percent(&cpu(100, 900), &cpu(100, 900)), 0);
    }
}
