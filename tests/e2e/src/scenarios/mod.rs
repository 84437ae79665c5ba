//! All scenarios, a file each. A file registers its scenarios in its `SCENARIOS`.

mod boot;
mod boot_time;
mod branch;
mod branch_faults;
mod checkpoint;
mod disk;
mod exec;
mod files;
mod fork;
mod hostile;
mod interp;
mod life;
mod load;
mod net;
mod overhead;
mod prefault;
mod pty;
mod smp;
mod snapshot_safety;
mod unique;

use crate::guest_half::GuestHalf;
use crate::scenario::{Registered, Scenario, soaking};

/// The files, in the order in which they run.
const FILES: &[&[Registered]] = &[
    boot::SCENARIOS,
    smp::SCENARIOS,
    exec::SCENARIOS,
    files::SCENARIOS,
    pty::SCENARIOS,
    interp::SCENARIOS,
    net::SCENARIOS,
    disk::SCENARIOS,
    life::SCENARIOS,
    hostile::SCENARIOS,
    overhead::SCENARIOS,
    fork::SCENARIOS,
    prefault::SCENARIOS,
    unique::SCENARIOS,
    snapshot_safety::SCENARIOS,
    branch::SCENARIOS,
    branch_faults::SCENARIOS,
    checkpoint::SCENARIOS,
    boot_time::SCENARIOS,
];

/// The halves that run inside a guest.
pub const GUEST_HALVES: &[GuestHalf] = &[disk::GUEST_HALF, load::GUEST_HALF];

/// The scenarios of this run: the everyday ones, and in a soak run the others as well.
pub fn all() -> Vec<Scenario> {
    FILES
        .iter()
        .flat_map(|file| file.iter())
        .flat_map(|registered| registered.scenarios(soaking()))
        .collect()
}
