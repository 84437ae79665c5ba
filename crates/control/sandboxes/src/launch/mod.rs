//! From a wish for a VM to a running one.
//!
//! `forkd-spawn` starts the processes and keeps their control sockets; this side fills the shells. The
//! files a VM is made of are opened here and handed over: a VMM opens no path.

mod cgroup;
mod dirs;
mod fds;
mod spawn;
mod vm;

pub use cgroup::Cgroups;
pub use dirs::{Dirs, NewDisk, NewLayer, VmFiles};
pub use fds::{FdList, SnapshotFiles};
pub use spawn::Launcher;
pub use vm::{BootInput, boot, check_engine, restore, shape};
