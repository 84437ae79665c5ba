//! What the fuzzer calls: one plain function for each target, which takes any bytes and returns.
//!
//! A function panics when the code under it does, and when something that must hold for any input does
//! not hold: a device that spins, state that was saved and is refused, a message that changes on the way.
//! The fuzzer itself lives in `fuzz/`, a workspace of its own; the saved inputs are below `fuzz/corpus`.

mod agent;
mod boot;
mod devices;
mod disk;
mod input;
mod protocols;
mod registers;
mod state;

/// A target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: &[Target] = &[
    ("agent_client", agent::client),
    ("balloon", devices::balloon),
    ("block", devices::block),
    ("boot", boot::kernel),
    ("disk_layer", disk::layer),
    ("guest_proto", protocols::guest),
    ("mmio_registers", registers::mmio),
    ("net", devices::net),
    ("rng", devices::rng),
    ("serial", registers::serial),
    ("slot_state", state::slot),
    ("virtqueue", devices::virtqueue),
    ("vmm_proto", protocols::vmm),
    ("vmm_state", state::machine),
    ("vsock", devices::vsock),
    ("vsock_packets", devices::vsock_packets),
];

/// Runs a target; false if there is none of that name.
pub fn run(name: &str, data: &[u8]) -> bool {
    let target = TARGETS.iter().find(|(target, _)| *target == name);
    if let Some((_, run)) = target {
        run(data);
    }
    target.is_some()
}
