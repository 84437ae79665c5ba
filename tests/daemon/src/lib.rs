//! The real daemon as a process, for scenarios that drive it over its REST API.
//!
//! [`Daemon::start`] runs `forkd-controller` from a directory of its own. Beside it are either `forkd-spawn` and
//! `forkd-vmm`, or [fakes](fake) that speak the same protocols without KVM. The guests of a fake VMM keep their state in guest
//! memory, so a branch, a fork or a roll-back that loses a page is seen by reading a file back.
//!
//! ```text
//!   scenario ──REST──► forkd-controller ──spawn protocol──► spawner ──starts──► VMM
//!      └────────────── faults: files in a directory ────────────────────────────┘
//! ```
//!
//! Scenarios use the REST client and the [`Daemon`] alone. Those that inject faults need fake VMMs; all others run
//! unchanged with `FORKD_TEST_VMMS=real` and `FORKD_TEST_PROGRAMS=DIR` on a host with KVM.

mod daemon;
pub mod fake;
mod guest;
mod leftovers;
mod programs;

pub use daemon::{Daemon, Options};
pub use guest::Sandbox;
pub use leftovers::Leftovers;
pub use programs::{Programs, Vmms};

use std::time::Duration;

/// How long a condition may take to become true. Generous: a loaded machine must not fail a test.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `probe` returns a value.
///
/// # Panics
///
/// Panics with `what` when the value does not come in time.
pub async fn until<T>(what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let waiting = async {
        loop {
            if let Some(found) = probe().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting)
        .await
        .unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}
