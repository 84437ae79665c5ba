//! Workspaces: sandboxes with a name that can be suspended to disk and resumed.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::NetworkRequest;

/// State of a workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum WorkspaceStatus {
    /// The sandbox of the workspace runs.
    Running,
    /// The state of the workspace is on disk.
    Suspended,
    /// The sandbox ended without being suspended.
    Stale,
}

/// A sandbox with a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WorkspaceInfo {
    /// ID of the workspace.
    pub id: String,
    /// Name of the workspace.
    pub name: String,
    /// Tag from which the workspace was first started.
    pub source_snapshot_tag: String,
    /// Tag of the suspended state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_state_tag: Option<String>,
    /// State of the workspace.
    pub status: WorkspaceStatus,
    /// ID of the sandbox, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_sandbox_id: Option<String>,
    /// Time of creation, in seconds since 1970.
    pub created_at_unix: u64,
    /// Time of the last start or suspension, in seconds since 1970.
    pub last_active_unix: u64,
    /// Path of the memory of the last state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_branch_memory_path: Option<String>,
    /// Who owns it *(extension)*.
    #[serde(default)]
    pub owner: String,
}

/// Body of `POST /v1/workspaces`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateWorkspace {
    /// Name of the workspace.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub name: String,
    /// Tag of the snapshot to start from.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub snapshot_tag: String,
    /// Accepted for compatibility; a sandbox has no network namespace, `network` decides what it reaches.
    #[serde(default)]
    pub per_child_netns: bool,
    /// Limit on host memory, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// Network policy; the default of the daemon if missing *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkRequest>,
}

/// Body of `POST /v1/workspaces/{name}/suspend`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SuspendRequest {
    /// Store only the changes since the snapshot from which the workspace was started.
    #[serde(default)]
    pub diff: bool,
}
