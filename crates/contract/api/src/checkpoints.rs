//! Checkpoints, roll back and forks of a running sandbox *(extension)*.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /v1/sandboxes/{id}/checkpoints`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointRequest {
    /// A name; one is made up if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub name: Option<String>,
}

/// A point a sandbox can go back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CheckpointInfo {
    /// Its name.
    pub name: String,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// How long the sandbox stood still, in microseconds.
    pub pause_us: u64,
    /// Bytes it takes.
    pub bytes: u64,
    /// Nothing had changed since the checkpoint before: this is another name for it.
    #[serde(default)]
    pub unchanged: bool,
}

/// Answer to `POST /v1/sandboxes/{id}/rollback`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RollbackInfo {
    /// The checkpoint.
    pub to: String,
    /// How long the sandbox stood still, in microseconds.
    pub pause_us: u64,
    /// Pages of memory that were put back.
    pub pages: u64,
    /// From the request until the agent answered again, in microseconds.
    pub ready_us: u64,
}

/// Body of `POST /v1/sandboxes/{id}/rollback`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RollbackRequest {
    /// Where to go back to; the newest checkpoint if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub to: Option<String>,
}

/// Body of `POST /v1/sandboxes/{id}/fork`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ForkRequest {
    /// How many children, 1 to 1000.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 1000, default = 1)]
    pub n: u32,
    /// Seconds after which the children are deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// Labels of the children.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Freeze the processes in the guest for the cut, so that none runs in a child before the child has random numbers,
    /// names and a clock of its own. Fails if a process cannot be frozen within two seconds.
    #[serde(default)]
    pub freeze: bool,
}

fn one() -> u32 {
    1
}
