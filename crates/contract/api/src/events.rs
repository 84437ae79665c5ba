//! The stream of events *(extension)*.
//!
//! The daemon sends one [`EventInfo`] per change of a sandbox, snapshot or workspace. Events are not stored:
//! a reader gets those after its request.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A sandbox is ready.
    SandboxReady,
    /// A sandbox could not be started, or it ended by itself.
    SandboxFailed,
    /// A sandbox was deleted.
    SandboxDeleted,
    /// A sandbox was branched.
    SandboxBranched,
    /// A sandbox was rolled back to a checkpoint.
    SandboxRolledBack,
    /// The network policy of a sandbox denied a connection. At most one event per second and sandbox; the flow log has
    /// every denial.
    NetworkDenied,
    /// Every connection of a sandbox was reset, because the network engine was restarted or failed.
    NetworkReset,
    /// A snapshot is ready.
    SnapshotReady,
    /// A snapshot could not be made.
    SnapshotFailed,
    /// A snapshot was deleted.
    SnapshotDeleted,
    /// A workspace changed its state.
    WorkspaceChanged,
    /// Events were lost because the reader was too slow.
    Lagged,
}

/// One line (NDJSON) or one event (SSE) of `GET /v1/events`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventInfo {
    /// Sequence number since the start of the daemon.
    pub seq: u64,
    /// Time in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// Kind of the event.
    pub kind: EventKind,
    /// Name or ID of the sandbox, snapshot or workspace.
    pub object: String,
    /// Details for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Who owns that sandbox, snapshot or workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}
