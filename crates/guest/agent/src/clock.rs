//! Reads, sets and shifts the clocks of the guest.

use forkd_guest_proto::{AgentError, ClockRequest, ClockState};
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};

use crate::error;

/// Reads the clocks, after setting the wall clock if asked.
pub fn clock(request: ClockRequest) -> Result<ClockState, AgentError> {
    let wanted = match (request.set_unix_ns, request.shift_ns) {
        (None, None | Some(0)) => None,
        (Some(time), shift) => Some(time.saturating_add(shift.unwrap_or(0))),
        (None, Some(shift)) => Some(now(ClockId::Realtime).saturating_add(shift)),
    };
    let step_ns = wanted.map(set).transpose()?;
    Ok(ClockState {
        unix_ns: now(ClockId::Realtime),
        monotonic_ns: now(ClockId::Monotonic),
        boottime_ns: now(ClockId::Boottime),
        step_ns,
    })
}

/// Sets the wall clock; says how far it was off.
pub fn set(unix_ns: i64) -> Result<i64, AgentError> {
    let step = unix_ns.saturating_sub(now(ClockId::Realtime));
    let time = Timespec {
        tv_sec: unix_ns.div_euclid(1_000_000_000),
        tv_nsec: unix_ns.rem_euclid(1_000_000_000),
    };
    clock_settime(ClockId::Realtime, time)
        .map_err(|errno| error::io("cannot set the wall clock", &errno.into()))?;
    Ok(step)
}

/// A clock in nanoseconds.
pub fn now(clock: ClockId) -> i64 {
    let time = clock_gettime(clock);
    time.tv_sec
        .saturating_mul(1_000_000_000)
        .saturating_add(time.tv_nsec)
}
