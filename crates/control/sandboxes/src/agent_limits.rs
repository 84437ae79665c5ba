//! Limits for calls to agents.
//!
//! A guest is not trusted to answer in time or in size: each kind of call has a deadline, and the answers of all guests
//! share one memory budget, so that guests cannot use up the memory of the daemon.

use std::sync::LazyLock;
use std::time::Duration;

use forkd_agent_client::{Budget, Deadline};

/// A request that the agent carries out by itself: a listing, a signal, a directory, a thaw.
const ANSWER: Duration = Duration::from_secs(30);
/// The start of a program, of a transfer or of a watch. A busy guest may have to read the program from its disk.
const START: Duration = Duration::from_secs(60);
/// The end of a process that got `SIGKILL`. Its output is read first, and a client may be slow.
const ENDING: Duration = Duration::from_secs(5);
/// A ping of the agent.
const PING: Duration = Duration::from_secs(5);
/// A new identity, with its hooks. The agent gives an interpreter two minutes.
const IDENTITY: Duration = Duration::from_secs(300);
/// The time that an answer may take beyond the time that the request gives to the command.
const GRACE: Duration = Duration::from_secs(10);
/// The memory that answers of all guests may take together.
const ANSWERS: usize = 512 << 20;

/// The budget that all connections share.
pub static BUDGET: LazyLock<Budget> = LazyLock::new(|| Budget::of(ANSWERS));

/// For a request that the agent carries out by itself.
pub fn answer() -> Deadline {
    Deadline::within(ANSWER)
}

/// For the start of a program, of a transfer or of a watch.
pub fn start() -> Deadline {
    Deadline::within(START)
}

/// For the end of a process that got `SIGKILL`.
pub fn ending() -> Deadline {
    Deadline::within(ENDING)
}

/// For a ping.
pub fn ping() -> Deadline {
    Deadline::within(PING)
}

/// For a new identity.
pub fn identity() -> Deadline {
    Deadline::within(IDENTITY)
}

/// For a command that may run for this many seconds.
pub fn command(seconds: u64) -> Deadline {
    Deadline::within(Duration::from_secs(seconds).saturating_add(GRACE))
}
