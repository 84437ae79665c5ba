//! The machine: a shell, what fills it, and what can be done with it then.

mod boot;
mod checkpoint;
mod cut;
mod devices;
mod fds;
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
pub use fds::{FdError, Fds};
pub use notice::{Notice, Notices};
pub use restore::RestoreError;
pub use shell::{Machine, PauseError, PrepareError, ThreadKind, ThreadStart};
pub use vcpu::SpawnError;
