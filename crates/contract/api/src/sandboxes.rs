//! Sandboxes: live machines.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ErrorBody, LimitsRequest};

/// Body of `POST /v1/sandboxes`: start children of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateSandboxes {
    /// What to start from.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub snapshot_tag: String,
    /// How many, 1 to 1000.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 1000, default = 1)]
    pub n: u32,
    /// Give each child a network namespace of its own.
    #[serde(default)]
    pub per_child_netns: bool,
    /// The same as `limits.memory_mib`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 16, maximum = 16777216)]
    pub memory_limit_mib: Option<u64>,
    /// Limits on each child *(extension)*.
    #[serde(default, skip_serializing_if = "LimitsRequest::is_empty")]
    pub limits: LimitsRequest,
    /// Taken for compatibility; every branch is incremental without it.
    #[serde(default)]
    pub prewarm: bool,
    /// Taken for compatibility; every sandbox can be branched live.
    #[serde(default)]
    pub live_fork: bool,
    /// Taken for compatibility.
    #[serde(default)]
    pub hugepages: bool,
    /// Answer when every child's agent has answered, or at once with 202 *(extension)*.
    #[serde(default = "crate::snapshots::yes")]
    pub wait: bool,
    /// Seconds after which the sandboxes are deleted *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// Labels, at most 32 *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

impl Default for CreateSandboxes {
    fn default() -> Self {
        Self {
            snapshot_tag: String::new(),
            n: one(),
            per_child_netns: false,
            memory_limit_mib: None,
            limits: LimitsRequest::default(),
            prewarm: false,
            live_fork: false,
            hugepages: false,
            wait: true,
            timeout_secs: None,
            labels: BTreeMap::new(),
        }
    }
}

fn one() -> u32 {
    1
}

/// Body of `PATCH /v1/sandboxes/{id}` *(extension)*.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpdateSandbox {
    /// Seconds from now after which the sandbox is deleted; 0 is never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// New labels, in place of all old ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
}

/// Where a sandbox is in its life.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// Its VM starts; the agent has not answered yet.
    Launching,
    /// Its agent has answered.
    Running,
    /// It stands still on request.
    Paused,
    /// It is being cut for a branch or a checkpoint.
    Cutting,
    /// It is being ended.
    Stopping,
    /// It could not be started, or it ended by itself.
    Failed,
}

/// A live machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxInfo {
    /// Its id.
    pub id: String,
    /// What it was started from.
    pub snapshot_tag: String,
    /// Its network namespace, as a name under `/var/run/netns`.
    #[schema(required)]
    pub netns: Option<String>,
    /// Where its agent listens inside that namespace.
    pub guest_addr: String,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// The VMM process.
    #[schema(required)]
    pub pid: Option<u32>,
    /// Limit on host memory, in MiB.
    #[schema(required)]
    pub memory_limit_mib: Option<u64>,
    /// It has been branched.
    pub has_branched: bool,
    /// Where the memory of its last branch lies.
    #[schema(required)]
    pub last_branch_memory_path: Option<String>,
    /// How often it has been branched.
    pub branch_count: u32,
    /// Where it is in its life *(extension)*.
    pub state: SandboxState,
    /// Why it failed, if it did *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
    /// When it will be deleted, in seconds since 1970 *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_unix: Option<u64>,
    /// From the request to the agent's answer, in microseconds *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_us: Option<u64>,
    /// Guest memory in MiB *(extension)*.
    #[serde(default)]
    pub memory_mib: u32,
    /// Number of vCPUs *(extension)*.
    #[serde(default)]
    pub vcpus: u8,
    /// Host name in the guest *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// The workspace it belongs to *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    /// Labels *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Who owns it *(extension)*.
    #[serde(default)]
    pub owner: String,
}

/// What a live sandbox uses of the host: an entry of `GET /v1/stats` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxStats {
    /// Its id.
    pub id: String,
    /// What it was started from.
    pub snapshot_tag: String,
    /// Where it is in its life.
    pub state: SandboxState,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Host memory that only it has: what it changed, and its VMM.
    pub own_bytes: u64,
    /// Host memory it has mapped and others may have too.
    pub shared_bytes: u64,
    /// Processor time since it started, in microseconds.
    pub cpu_us: u64,
}
