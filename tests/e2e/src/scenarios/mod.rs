//! All scenarios, a file each.

mod boot;

use crate::scenario::{Scenario, list};

/// Every scenario, in the order they run.
pub fn all() -> Vec<Scenario> {
    list![
        boot: one_vcpu, two_vcpus, four_vcpus, compressed_kernel;
    ]
}

/// The guest half of that name.
pub fn guest_half(_name: &str, _args: &[String]) -> Option<anyhow::Result<()>> {
    None
}
