//! Sandboxes: running VMs.
//!
//! [`CreateSandboxes`] starts children of a snapshot, [`SandboxInfo`] describes one, and [`SandboxStats`] has
//! its resource usage.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{ErrorBody, LimitsRequest, NetworkPolicy, NetworkRequest, PortRequest, VolumeMount};

/// Body of `POST /v1/sandboxes`: start children of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateSandboxes {
    /// Tag of the snapshot to start from.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub snapshot_tag: String,
    /// Number of children, 1 to 1000.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 1000, default = 1)]
    pub n: u32,
    /// Give each child a network namespace in which `guest_addr` is valid. Only a daemon that runs as root makes one;
    /// `netns` in the answer names it. `network` decides what the child reaches.
    #[serde(default)]
    pub per_child_netns: bool,
    /// Network policy of each child; the default of the daemon if missing *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkRequest>,
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
    /// Accepted for compatibility; every sandbox can be branched live.
    #[serde(default)]
    pub live_fork: bool,
    /// Accepted for compatibility; has no effect.
    #[serde(default)]
    pub hugepages: bool,
    /// Respond when every child is ready; if false, respond with 202 at once *(extension)*.
    #[serde(default = "crate::snapshots::yes")]
    pub wait: bool,
    /// Seconds after which the sandboxes are deleted *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// Labels, at most 32 *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Environment variables of every program that is started through the API *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Free data of the client, at most 256 entries and 64 KiB; it cannot be searched *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Ports with settings, at most 64 *(extension)*.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub ports: Vec<PortRequest>,
    /// Volumes of each child, at most 3 *(extension)*.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 3)]
    pub volumes: Vec<VolumeMount>,
}

impl Default for CreateSandboxes {
    fn default() -> Self {
        Self {
            snapshot_tag: String::new(),
            n: one(),
            per_child_netns: false,
            network: None,
            memory_limit_mib: None,
            limits: LimitsRequest::default(),
            prewarm: false,
            live_fork: false,
            hugepages: false,
            wait: true,
            timeout_secs: None,
            labels: BTreeMap::new(),
            env: BTreeMap::new(),
            metadata: BTreeMap::new(),
            ports: Vec::new(),
            volumes: Vec::new(),
        }
    }
}

fn one() -> u32 {
    1
}

/// The policy of a sandbox of a daemon that does not know networks.
fn no_network() -> NetworkPolicy {
    NetworkPolicy {
        mode: "none".to_owned(),
        ..NetworkPolicy::default()
    }
}

/// Body of `PATCH /v1/sandboxes/{id}` *(extension)*.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpdateSandbox {
    /// Seconds from now after which the sandbox is deleted; 0 for never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// New labels; they replace all old ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// New limits on host resources; they replace all old ones, and take effect at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsRequest>,
    /// New network policy. Connections that it does not allow are reset before the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkRequest>,
}

/// State of a sandbox.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// The VM starts; the agent has not answered yet.
    Launching,
    /// The sandbox is ready.
    Running,
    /// The vCPUs are paused on request.
    Paused,
    /// The VM is being cut for a branch or a checkpoint.
    Cutting,
    /// The sandbox is being deleted.
    Stopping,
    /// The VM could not be started, or it ended by itself.
    Failed,
}

/// A running VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxInfo {
    /// ID of the sandbox.
    pub id: String,
    /// Tag of the snapshot from which the sandbox was started.
    pub snapshot_tag: String,
    /// Network namespace, as a name under `/var/run/netns`.
    #[schema(required)]
    pub netns: Option<String>,
    /// Address of the agent inside that namespace.
    pub guest_addr: String,
    /// Time of creation, in seconds since 1970.
    pub created_at_unix: u64,
    /// Process ID of the VMM.
    #[schema(required)]
    pub pid: Option<u32>,
    /// Limit on host memory, in MiB.
    #[schema(required)]
    pub memory_limit_mib: Option<u64>,
    /// Limits on host resources *(extension)*.
    #[serde(default, skip_serializing_if = "LimitsRequest::is_empty")]
    pub limits: LimitsRequest,
    /// Network policy *(extension)*.
    #[serde(default = "no_network")]
    pub network: NetworkPolicy,
    /// Whether the sandbox has been branched.
    pub has_branched: bool,
    /// Path of the memory of its last branch.
    #[schema(required)]
    pub last_branch_memory_path: Option<String>,
    /// Number of branches of the sandbox.
    pub branch_count: u32,
    /// State of the sandbox *(extension)*.
    pub state: SandboxState,
    /// Error of a failed sandbox *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
    /// Time at which the sandbox is deleted, in seconds since 1970 *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_unix: Option<u64>,
    /// Time from the request until the child was ready, in microseconds *(extension)*.
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
    /// Workspace of the sandbox *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    /// Labels of the sandbox *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Free data of the client *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// Who owns it *(extension)*.
    #[serde(default)]
    pub owner: String,
    /// Volumes of the sandbox *(extension)*.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeMount>,
}

/// Resource usage of a sandbox: an entry of `GET /v1/stats` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxStats {
    /// ID of the sandbox.
    pub id: String,
    /// Tag of the snapshot from which the sandbox was started.
    pub snapshot_tag: String,
    /// State of the sandbox.
    pub state: SandboxState,
    /// Time of creation, in seconds since 1970.
    pub created_at_unix: u64,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Host memory of this sandbox alone: changed pages and the VMM, in bytes.
    pub own_bytes: u64,
    /// Mapped host memory that others may share, in bytes.
    pub shared_bytes: u64,
    /// CPU time since the start, in microseconds.
    pub cpu_us: u64,
    /// Host memory that counts against the memory limit, in bytes; absent if the sandbox has no cgroup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub charged_bytes: Option<u64>,
    /// Bytes read from disks of the host since the start; absent if the host does not count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// Bytes written to disks of the host since the start; absent if the host does not count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_bytes: Option<u64>,
}
