//! Branching a running sandbox.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a branch is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum BranchMode {
    /// The snapshot holds all memory itself; the source stands still only for the instant of the cut.
    Full,
    /// The snapshot holds what differs from the one the source was started from.
    Diff,
    /// As `diff`; the default.
    Live,
}

/// Body of `POST /v1/sandboxes/{id}/branch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BranchRequest {
    /// The name of the new snapshot; one is made up if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub tag: Option<String>,
    /// How the branch is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<BranchMode>,
    /// The older spelling of `"mode": "diff"`.
    #[serde(default)]
    pub diff: bool,
    /// The older spelling of `"mode": "live"`.
    #[serde(default)]
    pub live: bool,
    /// Report what a diff would have held.
    #[serde(default)]
    pub measure_diff: bool,
    /// Answer when the snapshot is durable, or with 202 as soon as the source runs again.
    #[serde(default = "crate::snapshots::yes")]
    pub wait: bool,
    /// Must be the tag that the source was started from, if given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub parent_tag: Option<String>,
    /// Freeze the processes in the guest for the cut, so that none runs in a child before the child has random numbers,
    /// names and a clock of its own. Fails if a process cannot be frozen within two seconds.
    #[serde(default)]
    pub freeze: bool,
}

impl Default for BranchRequest {
    fn default() -> Self {
        Self {
            tag: None,
            mode: None,
            diff: false,
            live: false,
            measure_diff: false,
            wait: true,
            parent_tag: None,
            freeze: false,
        }
    }
}
