//! The first frame of each side.

use serde::{Deserialize, Serialize};

use crate::window;

/// The first frame of each side. The host speaks first; the agent answers, or closes when the token is
/// wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// [`crate::PROTOCOL_VERSION`] of the sender.
    pub version: u32,
    /// Abilities of the sender beyond the version.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
    /// How many bytes the sender of this is ready to hold per channel.
    pub window: u32,
    /// The sender's program and version, for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub program: String,
    /// The shared secret, where the transport itself does not say who is calling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

impl Default for Hello {
    fn default() -> Self {
        Self {
            version: crate::PROTOCOL_VERSION,
            features: Vec::new(),
            window: window::DEFAULT,
            program: String::new(),
            token: None,
        }
    }
}

impl Hello {
    /// The sender has this feature.
    #[must_use]
    pub fn has(&self, feature: &str) -> bool {
        self.features.iter().any(|known| known == feature)
    }
}

/// Names of features.
pub mod feature {
    /// Execution, process list, attach, signals.
    pub const EXEC: &str = "exec";
    /// Processes on pseudo-terminals.
    pub const PTY: &str = "pty";
    /// Requests about files.
    pub const FILES: &str = "files";
    /// Watches on files and directories.
    pub const WATCH: &str = "watch";
    /// Interpreters that keep their state.
    pub const INTERP: &str = "interp";
    /// A fork becomes a machine of its own.
    pub const IDENTITY: &str = "identity";
    /// Connections to ports and sockets inside.
    pub const DIAL: &str = "dial";
    /// Clock, metrics, network, quiesce, shutdown.
    pub const MACHINE: &str = "machine";
    /// Trees of files as tar streams, mounts, and the end of all user processes.
    pub const BUILD: &str = "build";
    /// Services with declared readiness, and waiting for a calm guest.
    pub const SERVICES: &str = "services";
    /// All that this version knows.
    pub const ALL: &[&str] = &[
        EXEC, PTY, FILES, WATCH, INTERP, IDENTITY, DIAL, MACHINE, BUILD, SERVICES,
    ];
}
