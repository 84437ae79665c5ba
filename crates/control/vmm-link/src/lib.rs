//! How tokio programs talk to VMM processes and to `forkd-spawn`.
//!
//! Both speak packets over a `SOCK_SEQPACKET` socket; [`Vmm`] and [`Spawner`] match answers to requests
//! and hand everything that comes unasked to a channel.

mod link;
mod process;
mod socket;
mod spawner;
mod vmm;

pub use link::LinkError;
pub use process::Process;
pub use spawner::{Ended, Endings, Spawner, SpawnerError, Taken, end_spawner};
pub use vmm::{Vmm, VmmCallError, VmmEvent, VmmEvents};
