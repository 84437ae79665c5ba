//! The events stream *(extension)*.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// A sandbox is ready.
    SandboxReady,
    /// A sandbox could not be started or ended by itself.
    SandboxFailed,
    /// A sandbox was deleted.
    SandboxDeleted,
    /// A sandbox was branched.
    SandboxBranched,
    /// A sandbox went back to a checkpoint.
    SandboxRolledBack,
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
    /// Counts up from the start of the daemon.
    pub seq: u64,
    /// When, in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// What.
    pub kind: EventKind,
    /// Which sandbox, snapshot or workspace.
    pub object: String,
    /// More, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Who owns that sandbox, snapshot or workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}
