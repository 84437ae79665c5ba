//! The devices a guest sees, and the thread that works for them.
//!
//! ```text
//!   vCPU threads ──register access──► bus ──► virtio::MmioTransport ─┐ lock
//!   KVM ioeventfd ──queue kick──► EventLoop (device or disk thread) ─┴─► VirtioDevice ──► back end
//!                                                                         └─ irqfd ──► KVM
//! ```
//!
//! A virtio slot ([`virtio::MmioTransport`]) exists with its doorbells before there is a device in it; a
//! boot or a restore puts one in. Everything a guest can reach is hostile input: what a device cannot
//! work with makes that device stand still until the driver resets it, and the rest goes on.

pub mod bus;
pub mod disk;
mod event;
pub mod event_loop;
pub mod legacy;
mod log;
pub mod metrics;
pub mod rate;
#[cfg(any(test, feature = "test-utils"))]
pub mod testing;
pub mod virtio;

pub use event::{EventFd, TimerFd};
pub use event_loop::{EventLoop, EventTarget, LoopHandle, Ready, Registrar};

use std::os::fd::OwnedFd;

use forkd_vmm_proto::DeviceSlot;

/// Guest memory as devices see it.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;

/// Events from devices to the VMM.
///
/// Called from the device thread or a vCPU thread with the lock of the device's slot held: an
/// implementation hands the news on and returns, and never calls into a slot.
pub trait DeviceEvents: Send + Sync {
    /// The agent in the guest has connected to the ready port.
    fn agent_ready(&self);
    /// The guest connected to another host port; `stream` is the far end.
    fn vsock_connect(&self, port: u32, stream: OwnedFd);
    /// A device stands still until its driver resets it.
    fn device_failed(&self, slot: DeviceSlot, reason: &str);
}

/// Gives guest memory back to the host.
///
/// Called from the device thread. The range is inside guest memory and page-aligned. What the guest reads
/// there afterwards is zero, or what that page was when the machine started.
pub trait MemoryReclaim: Send + Sync {
    /// Drops `len` bytes at guest physical address `addr`.
    fn discard(&self, addr: u64, len: u64) -> std::io::Result<()>;
}
