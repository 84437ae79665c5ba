//! Scenarios through the daemon. One program, so that the daemon is linked once.

mod branch;
mod builds;
mod checkpoint;
mod costs;
mod crash;
mod delete;
mod fleet;
mod fork;
mod hub;
mod jail;
mod leftovers;
mod limits;
mod load;
mod memory_limit;
mod metrics;
mod network;
mod ports;
mod secrets;
mod spawn;
mod workspace;

use forkd_daemon_tests::{Daemon, Options, programs};

/// The tag of every scenario's parent.
const TAG: &str = "parent";

/// A daemon with a parent.
async fn daemon() -> Daemon {
    daemon_with(Options::default()).await
}

/// A daemon with more arguments and a parent.
async fn daemon_with(options: Options) -> Daemon {
    let daemon = Daemon::with(programs!(), options).await;
    daemon.parent(TAG).await.expect("a parent is built");
    daemon
}
