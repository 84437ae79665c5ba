//! From a wish for a VM to a running one.
//!
//! `forkd-spawn` starts the processes and keeps their control sockets; this side fills the shells. The
//! files a VM is made of are opened here and handed over: a VMM opens no path.

mod broker;
mod demand;
mod dirs;
pub mod engine;
mod fds;
mod net;
mod program;
mod spawn;
mod vm;

pub use broker::BrokerLauncher;
pub use demand::Demand;
pub use dirs::{Dirs, NewDisk, NewLayer, VmFiles};
pub use fds::{FdList, SnapshotFiles, check_budget};
pub use net::NetLauncher;
pub use spawn::{Launcher, StartedVm};
pub use vm::{BootInput, boot, has_network_words, network_words, random_mac, restore, shape};
