//! Starts real VMMs with real guests and gives tests a handle on them.
//!
//! A [`Kit`] owns one `forkd-spawn`, so everything a test starts ends with the kit. [`Kit::boot`] gives a
//! [`Vm`] whose agent has answered; [`Vm::freeze`] cuts it into a [`Frozen`] that [`Kit::fork`] starts
//! children from. No daemon is involved: this is the product below the controller.

mod assets;
mod checkpoint;
mod cut;
mod disk;
mod ends;
mod faults;
mod fds;
mod frozen;
mod guest;
mod kit;
mod net;
pub mod procfs;
mod vm;

pub use assets::Assets;
pub use checkpoint::Point;
pub use cut::CutFiles;
pub use disk::Disk;
pub use faults::{Killer, SmallDisk};
pub use fds::Fds;
pub use frozen::Frozen;
pub use kit::{BootOptions, ForkOptions, Kit, Root, last_of_consoles, work_folder};
pub use net::{Namespace, Pump};
pub use vm::Vm;
