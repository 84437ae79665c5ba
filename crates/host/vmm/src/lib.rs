//! The monitor of one microVM.
//!
//! ```text
//!   control thread   commands and events over one socket; builds, boots, restores, cuts
//!   device thread    one event loop for all devices but disks
//!   disk thread      one event loop for all disks, whose I/O is synchronous
//!   vCPU threads     one each; parked until there is something to run
//! ```
//!
//! A VM is made in two steps. *Prepare* builds a shell: everything that makes the kernel wait for grace
//! periods (the VM, its memory slots over reserved address space, doorbells, interrupt lines, vCPUs).
//! *Boot* or *restore* fills it: memory is mapped over the reserved range and registers are set, and none of
//! that waits. A *cut* stops everything for a moment, takes the state, forks the process so that the
//! memory as of that moment stays, and goes on.

pub mod arch;
pub mod kvm;
pub mod machine;
pub mod program;
pub mod state;
