//! How tokio programs talk to VMM processes, to `forkd-spawn` and to `forkd-net`.
//!
//! All speak packets over a `SOCK_SEQPACKET` socket; [`Vmm`], [`Spawner`] and [`NetEngine`] match answers to requests
//! and hand everything that comes unasked to a channel.

mod link;
mod net;
mod process;
mod socket;
mod spawner;
mod vmm;

pub use link::LinkError;
pub use net::{LogPage, NetEngine, NetEngineError, NetEvent, NetNews, end_net_engine, frame_pair};
pub use process::Process;
pub use spawner::{Ended, Endings, Spawner, SpawnerError, Taken, end_spawner};
pub use vmm::{Vmm, VmmCallError, VmmEvent, VmmEvents};
