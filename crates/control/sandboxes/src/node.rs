//! The daemon as one host of a fleet: its name, its room and its load.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forkd_api::NodeInfo;

use crate::app::App;

/// How long a measured load is passed on before it is measured again.
const FRESH: Duration = Duration::from_millis(250);
/// A load is at most this.
const FULL: u64 = 1000;

/// Describes this host.
pub fn info(app: &App) -> NodeInfo {
    let room = app.limits.room();
    NodeInfo {
        name: app.config.node.as_ref().map(ToString::to_string),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        draining: room.draining,
        load: load_of(&room),
        sandboxes: room.vms,
        max_sandboxes: room.max_vms,
        memory_mib: room.memory_mib,
        free_mib: room.free_mib,
        cpus: std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32),
    }
}

/// The reserved and the free part of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// VMs that are reserved.
    pub vms: u64,
    /// The largest number of VMs.
    pub max_vms: u64,
    /// Memory of the host.
    pub memory_mib: u64,
    /// Memory that children may still take.
    pub free_mib: u64,
    /// No new VM is taken.
    pub draining: bool,
}

/// The load of the host in thousandths: the larger of used VMs and used memory.
fn load_of(room: &Room) -> u32 {
    let part = |used: u64, all: u64| {
        let all = all.max(1);
        used.saturating_mul(FULL).checked_div(all).unwrap_or(FULL)
    };
    let memory = part(
        room.memory_mib.saturating_sub(room.free_mib),
        room.memory_mib,
    );
    let load = part(room.vms, room.max_vms).max(memory).min(FULL);
    load as u32
}

/// Measures the load of the host now and then. Every response carries it.
#[derive(Debug)]
pub struct LoadMeter {
    begin: Instant,
    /// Milliseconds since the beginning at which the load was measured, and the load: `at << 16 | load`.
    last: AtomicU64,
}

impl Default for LoadMeter {
    fn default() -> Self {
        Self {
            begin: Instant::now(),
            last: AtomicU64::new(0),
        }
    }
}

impl LoadMeter {
    /// The load in thousandths, at most a quarter of a second old.
    pub fn load(&self, app: &App) -> u32 {
        let now = self.begin.elapsed().as_millis() as u64 + FRESH.as_millis() as u64;
        let last = self.last.load(Ordering::Relaxed);
        if now.saturating_sub(last >> 16) < FRESH.as_millis() as u64 {
            return (last & 0xffff) as u32;
        }
        let load = load_of(&app.limits.room());
        self.last
            .store(now << 16 | u64::from(load), Ordering::Relaxed);
        load
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(vms: u64, free_mib: u64) -> Room {
        Room {
            vms,
            max_vms: 100,
            memory_mib: 1000,
            free_mib,
            draining: false,
        }
    }

    #[test]
    fn the_scarcer_resource_is_the_load() {
        assert_eq!(load_of(&room(0, 1000)), 0);
        assert_eq!(load_of(&room(50, 1000)), 500);
        assert_eq!(load_of(&room(50, 300)), 700);
        assert_eq!(load_of(&room(500, 0)), 1000);
    }
}
