//! How tokio programs talk to VMM processes, to `forkd-spawn`, to `forkd-net` and to `forkd-broker`.
//!
//! All speak packets over a `SOCK_SEQPACKET` socket; [`Vmm`], [`Spawner`], [`NetEngine`] and [`Broker`] match answers to
//! requests and hand everything that comes unasked to a channel.

mod broker;
mod link;
mod net;
mod process;
mod socket;
mod spawner;
mod vmm;

pub use broker::{Broker, BrokerCallError, BrokerNews, Refused, broker_pair, end_broker};
pub use link::LinkError;
pub use net::{LogPage, NetEngine, NetEngineError, NetEvent, NetNews, end_net_engine, frame_pair};
pub use process::Process;
pub use spawner::{Ended, Endings, Spawner, SpawnerError, Taken, end_spawner};
pub use vmm::{Vmm, VmmCallError, VmmEvent, VmmEvents};
