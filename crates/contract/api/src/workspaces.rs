//! Workspaces: sandboxes with a name that can be put to sleep.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a workspace is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum WorkspaceStatus {
    /// Its sandbox lives.
    Running,
    /// Its state is on disk.
    Suspended,
    /// Its sandbox ended without being suspended.
    Stale,
}

/// A workspace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WorkspaceInfo {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// What it was first started from.
    pub source_snapshot_tag: String,
    /// Where its state lies, once suspended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_state_tag: Option<String>,
    /// Where it is.
    pub status: WorkspaceStatus,
    /// Its sandbox, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_sandbox_id: Option<String>,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// When it was last started or suspended, in seconds since 1970.
    pub last_active_unix: u64,
    /// Where the memory of its last state lies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_branch_memory_path: Option<String>,
    /// Who owns it *(extension)*.
    #[serde(default)]
    pub owner: String,
}

/// Body of `POST /v1/workspaces`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateWorkspace {
    /// Its name.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub name: String,
    /// What to start from.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub snapshot_tag: String,
    /// Give it a network namespace of its own.
    #[serde(default)]
    pub per_child_netns: bool,
    /// Limit on host memory, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
}

/// Body of `POST /v1/workspaces/{name}/suspend`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SuspendRequest {
    /// Keep only what differs from the snapshot it was started from.
    #[serde(default)]
    pub diff: bool,
}
