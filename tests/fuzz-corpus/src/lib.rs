//! The fuzz targets: one function per target, which takes any bytes and returns.
//!
//! A target panics if the code under test panics, or if an invariant is broken: a device spins, a device
//! rejects its own saved state, or a message changes when it is encoded and decoded. `fuzz/` calls the
//! targets from the fuzzer, `tests/replay.rs` runs the saved inputs.

mod agent;
mod boot;
mod broker;
mod devices;
mod disk;
mod dockerfile;
mod input;
mod network;
mod protocols;
mod recipe;
mod registers;
mod state;

/// Name and function of a target.
pub type Target = (&'static str, fn(&[u8]));

pub const TARGETS: &[Target] = &[
    ("agent_client", agent::client),
    ("balloon", devices::balloon),
    ("block", devices::block),
    ("boot", boot::kernel),
    ("broker_requests", broker::requests),
    ("client_hello", network::first_bytes),
    ("disk_layer", disk::layer),
    ("dns", network::dns_messages),
    ("dockerfile", dockerfile::file),
    ("guest_proto", protocols::guest),
    ("mmio_registers", registers::mmio),
    ("net", devices::net),
    ("net_frames", network::frames),
    ("net_rules", network::rules),
    ("recipe", recipe::recipe),
    ("rng", devices::rng),
    ("serial", registers::serial),
    ("slot_state", state::slot),
    ("virtqueue", devices::virtqueue),
    ("vmm_proto", protocols::vmm),
    ("vmm_state", state::machine),
    ("vsock", devices::vsock),
    ("vsock_packets", devices::vsock_packets),
];

/// Runs a target by name. Returns `false` for an unknown name.
pub fn run(name: &str, data: &[u8]) -> bool {
    let target = TARGETS.iter().find(|(target, _)| *target == name);
    if let Some((_, run)) = target {
        run(data);
    }
    target.is_some()
}
