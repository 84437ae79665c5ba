//! The request that makes a child a machine of its own.

use serde::{Deserialize, Serialize};

use crate::NetworkRequest;

/// Makes the guest a machine of its own. Fields that are missing leave their part of the guest as it is.
///
/// The agent changes the machine (clock, kernel generator, connections, names), asks the interpreters to reseed,
/// thaws user processes, waits for the interpreters and runs the hooks. The response comes last. If the kernel or an
/// interpreter could not be reseeded, the response is an error and the child must not be used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct IdentityRequest {
    /// Changes with every fork; goes to `/run/forkd/generation`.
    pub generation: String,
    /// Fresh random bytes in hexadecimal, at least 32 of them.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub entropy: String,
    /// The new host name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// New machine ID, 32 hexadecimal digits. A roll-back sends none: the guest stays the machine it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// The wall clock at the moment of sending, nanoseconds since the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unix_ns: Option<i64>,
    /// New network settings of the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkRequest>,
    /// How long the hooks in `/etc/forkd/on-fork.d` may take together; five seconds when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hook_timeout_ms: Option<u64>,
    /// Leave connections of the parent alone.
    pub keep_connections: bool,
}

/// The identity in force, and the steps that were taken.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct IdentityReport {
    /// The generation that is now in `/run/forkd/generation`.
    pub generation: String,
    /// The host name now.
    pub hostname: String,
    /// The machine id now.
    pub machine_id: String,
    /// The boot id now, where it could be changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
    /// How far the wall clock was off, nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock_step_ns: Option<i64>,
    /// The wall clock at the moment of the answer, nanoseconds since the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unix_ns: Option<i64>,
    /// The kernel's random number generator took the entropy.
    pub reseeded: bool,
    /// Interpreters that were reseeded.
    pub interpreters: Vec<String>,
    /// User processes were frozen and run now.
    pub thawed: bool,
    /// Connections that were reset, and how.
    pub connections_reset: u32,
    /// Which way they were reset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reset_by: Option<Reset>,
    /// Results of the hooks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<HookResult>,
    /// Parts that failed; the others are done.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// How long it took, microseconds.
    pub took_us: u64,
}

/// The result of [`crate::Request::ResetConnections`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResetReport {
    pub connections_reset: u32,
}

/// How inherited connections were reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reset {
    /// The kernel was asked to destroy them.
    SockDestroy,
    /// Their descriptors were taken from the processes and disconnected.
    Disconnect,
    /// Another way, of a newer agent.
    #[serde(other)]
    Other,
}

/// The result of one hook.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookResult {
    /// Its file name.
    pub name: String,
    /// Exit code; `None` when it did not end in time or could not be started.
    pub code: Option<i32>,
    /// How long it ran.
    #[serde(default)]
    pub wall_ms: u64,
    /// The end of what it printed, or why it could not be started.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub output: String,
}
