//! The machine: an empty shell, how it is filled, and the operations on it.
//!
//! ```text
//!   prepare ──► shell ──boot──►    running ⇄ paused
//!                 └────restore──►  cut, checkpoint, roll back: from either, and back to it
//! ```
//!
//! [`Machine`] is owned by the control thread. Operations are in a file each: `boot`, `restore`, `cut`,
//! `checkpoint`. `history` knows which pages changed since when. vCPU and device threads report through
//! [`Notices`].

mod boot;
mod checkpoint;
mod cut;
mod devices;
mod history;
mod notice;
mod ports;
mod restore;
mod shell;
mod vcpu;

pub use boot::BootError;
pub use checkpoint::{CheckpointDone, CheckpointError, CheckpointInProgress, RollbackError};
pub use cut::{CutDone, CutError, CutInProgress};
pub use devices::{DeviceLoops, DeviceSet, DeviceSetError, DeviceSpec};
pub use forkd_vmm_proto::{FdError, Fds};
pub use notice::{Notice, Notices};
pub use restore::RestoreError;
pub use shell::{Machine, PauseError, PrepareError, ThreadKind, ThreadStart};
pub use vcpu::SpawnError;
