//! Snapshots: frozen VMs under a tag, and the store that holds them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::VolumeMount;

/// State of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotStatus {
    /// The snapshot is being written; children cannot start from it yet.
    Writing,
    /// The snapshot is complete and durable.
    Ready,
    /// Writing failed, or parts are missing or damaged.
    Failed,
}

/// A snapshot in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    /// Name of the snapshot.
    pub tag: String,
    /// Directory of the manifest on the host.
    pub dir: String,
    /// Time of creation, in seconds since 1970.
    pub created_at_unix: u64,
    /// State of the snapshot.
    pub status: SnapshotStatus,
    /// Whether children can be started from it now.
    pub bootable: bool,
    /// Sandbox from which the snapshot was branched, or `compact:<tag>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branched_from: Option<String>,
    /// Pause of the source, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<u64>,
    /// Duration of writing after the source ran again, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_ms: Option<u64>,
    /// Bytes that this snapshot stores itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_physical_bytes: Option<u64>,
    /// Bytes of guest memory that the snapshot describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_logical_bytes: Option<u64>,
    /// A problem, or other information for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Tag on which the snapshot is based *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// Guest memory in MiB *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// Number of vCPUs *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Image of the disk *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Engine that made the snapshot and runs its children *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// Pause in microseconds *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
    /// Bytes on disk, shared parts included *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub physical_bytes: Option<u64>,
    /// The owner; left out for snapshots without one, such as those copied into the store *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Whether every owner may see it and start children from it *(extension)*.
    #[serde(default)]
    pub public: bool,
}

/// Body of `PATCH /v1/snapshots/{tag}` *(extension)*. Fields that are left out stay as they are.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpdateSnapshot {
    /// Whether every owner may see the snapshot and start children from it. Only its owner may change and delete it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub public: Option<bool>,
}

/// Body of `POST /v1/snapshots`: boot a parent, warm it up, freeze it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateSnapshot {
    /// Tag of the new snapshot.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub tag: String,
    /// Path of a kernel on the daemon's host; by default `kernels/vmlinux` in the daemon's data directory, or
    /// the result of `forkd-image`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^/")]
    pub kernel: Option<String>,
    /// Path of a raw disk image on the daemon's host. Exactly one of `rootfs` and `image` is required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^/")]
    pub rootfs: Option<String>,
    /// Name of an installed image *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub image: Option<String>,
    /// Path of an initramfs on the daemon's host *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^/")]
    pub initramfs: Option<String>,
    /// Accepted for compatibility: the root file system is always writable. Writes go to a layer of the
    /// snapshot, never to the image.
    #[serde(default)]
    pub rw: bool,
    /// Accepted for compatibility; has no effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Accepted for compatibility, at most 60: a snapshot is made when agent and warm-up are ready, not after
    /// a fixed time.
    #[serde(default = "default_boot_wait")]
    #[schema(maximum = 60)]
    pub boot_wait_secs: u64,
    /// Guest memory in MiB *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 64, maximum = 65536)]
    pub mem_size_mib: Option<u32>,
    /// Number of vCPUs *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 32)]
    pub vcpus: Option<u8>,
    /// Command to run before the cut; it must exit with 0 *(extension)*.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warmup: Vec<String>,
    /// Python statements to run in the warm interpreter before the cut *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_code: Option<String>,
    /// Timeout for boot and warm-up, in seconds *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 3600)]
    pub ready_timeout_secs: Option<u64>,
    /// Respond when the snapshot is ready; if false, respond with 202 at once *(extension)*.
    #[serde(default = "crate::snapshots::yes")]
    pub wait: bool,
    /// Labels of the snapshot *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Engine of the parent and of all its children: `forkd`, or `firecracker` where the daemon has one
    /// *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 16, pattern = "^[a-z0-9-]+$")]
    pub engine: Option<String>,
    /// Volumes of the parent, at most 3, in the mode `ro` or `clone`. Every child gets a private copy *(extension)*.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 3)]
    pub volumes: Vec<VolumeMount>,
}

impl Default for CreateSnapshot {
    fn default() -> Self {
        Self {
            tag: String::new(),
            kernel: None,
            rootfs: None,
            image: None,
            initramfs: None,
            rw: false,
            tap: None,
            boot_wait_secs: default_boot_wait(),
            mem_size_mib: None,
            vcpus: None,
            warmup: Vec::new(),
            warmup_code: None,
            ready_timeout_secs: None,
            wait: true,
            labels: BTreeMap::new(),
            engine: None,
            volumes: Vec::new(),
        }
    }
}

fn default_boot_wait() -> u64 {
    10
}

pub(crate) fn yes() -> bool {
    true
}

/// Response to `GET /v1/snapshots/{tag}/info`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotDetail {
    /// Name of the snapshot.
    pub tag: String,
    /// Directory of the manifest on the host.
    pub dir: String,
    /// Time of creation, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at_unix: Option<u64>,
    /// Guest memory in bytes.
    pub memory_logical_bytes: u64,
    /// Bytes on disk of the memory that this snapshot stores itself.
    pub memory_physical_bytes: u64,
    /// Bytes of vCPU and device state.
    pub vmstate_bytes: u64,
    /// Tag on which the snapshot is based.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// Digest of the manifest on which the snapshot is based.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_content_hash: Option<String>,
    /// Number of ancestors.
    pub chain_depth: u32,
    /// Tags that are based directly on this one.
    pub dependents: Vec<String>,
    /// Tags on which this one is based, oldest first.
    pub ancestors: Vec<String>,
    /// Digest of the manifest *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_hash: Option<String>,
    /// Bytes on disk of the disk layers *(extension)*.
    #[serde(default)]
    pub disk_physical_bytes: u64,
    /// Bytes on disk that no other snapshot shares *(extension)*.
    #[serde(default)]
    pub unique_bytes: u64,
    /// Number of vCPUs *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Image of the disk *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Number of disk layers *(extension)*.
    #[serde(default)]
    pub disk_layers: u32,
    /// Number of memory layers *(extension)*.
    #[serde(default)]
    pub memory_layers: u32,
    /// Labels of the snapshot *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Body of `POST /v1/snapshots/{tag}/compact`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CompactRequest {
    /// Tag of the compacted copy.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub to: String,
}

/// Response to `GET /v1/store`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreUsage {
    /// Directory of the store on the host.
    pub dir: String,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Number of blobs.
    pub blobs: u64,
    /// Bytes that the blobs use on disk.
    pub physical_bytes: u64,
    /// Bytes that the blobs describe.
    pub logical_bytes: u64,
    /// Free bytes of the file system.
    pub free_bytes: u64,
    /// Limit on bytes on disk; a store above it refuses a new snapshot. Missing if there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
}

/// Response to `POST /v1/store/fsck`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FsckReport {
    /// Number of snapshots checked.
    pub snapshots: u64,
    /// Number of blobs whose digest was computed again.
    pub blobs_checked: u64,
    /// Problems, one sentence each.
    pub problems: Vec<String>,
    /// Repairs, one sentence each.
    pub repaired: Vec<String>,
}
