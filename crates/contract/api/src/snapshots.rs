//! Snapshots: frozen machines with a name.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether a snapshot can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotStatus {
    /// It is being written; it cannot be spawned from yet.
    Writing,
    /// It is whole and durable.
    Ready,
    /// Its writing failed, or parts of it are missing or damaged.
    Failed,
}

/// A snapshot in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotInfo {
    /// Its name.
    pub tag: String,
    /// Where its manifest lies on the host.
    pub dir: String,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// Whether it can be used.
    pub status: SnapshotStatus,
    /// Whether children can be started from it now.
    pub bootable: bool,
    /// The sandbox it was branched from, or `compact:<tag>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branched_from: Option<String>,
    /// How long the source stood still, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<u64>,
    /// How long writing took after the source went on, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_ms: Option<u64>,
    /// Bytes that this snapshot holds itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_physical_bytes: Option<u64>,
    /// Bytes of guest memory that it describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_logical_bytes: Option<u64>,
    /// What is wrong with it, or worth knowing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// The tag it builds on *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// Guest memory in MiB *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u32>,
    /// Number of vCPUs *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// The image its disk began as *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The pause in microseconds *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
    /// Bytes on disk, parts shared with others included *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub physical_bytes: Option<u64>,
    /// Who owns it; left out if nobody does, as for snapshots that were copied into the store *(extension)*.
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
    /// The name of the new snapshot.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub tag: String,
    /// Path of a kernel on the daemon's host. Left out, it is `kernels/vmlinux` in the daemon's data directory, or
    /// what `forkd-image` makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^/")]
    pub kernel: Option<String>,
    /// Path of a raw disk image on the daemon's host. Exactly one of `rootfs` and `image` is given.
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
    /// Path of an initial RAM disk on the daemon's host *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^/")]
    pub initramfs: Option<String>,
    /// Taken for compatibility: the root file system is always writable. Writes go to a layer of the snapshot, never
    /// to the image.
    #[serde(default)]
    pub rw: bool,
    /// Taken for compatibility; no network devices are made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Taken for compatibility, at most 60: a snapshot is cut when the agent and the warm-up are ready,
    /// not after a fixed time.
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
    /// A command to run before the cut; it must exit with 0 *(extension)*.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warmup: Vec<String>,
    /// Python statements to run in the warm interpreter before the cut *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_code: Option<String>,
    /// The longest that boot and warm-up may take, in seconds *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 3600)]
    pub ready_timeout_secs: Option<u64>,
    /// Answer when the snapshot is ready, or at once with 202 *(extension)*.
    #[serde(default = "crate::snapshots::yes")]
    pub wait: bool,
    /// Labels *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
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
        }
    }
}

fn default_boot_wait() -> u64 {
    10
}

pub(crate) fn yes() -> bool {
    true
}

/// Answer of `GET /v1/snapshots/{tag}/info`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotDetail {
    /// Its name.
    pub tag: String,
    /// Where its manifest lies on the host.
    pub dir: String,
    /// When it was made, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at_unix: Option<u64>,
    /// Guest memory in bytes.
    pub memory_logical_bytes: u64,
    /// Bytes on disk of the memory that this snapshot holds itself.
    pub memory_physical_bytes: u64,
    /// Bytes of vCPU and device state.
    pub vmstate_bytes: u64,
    /// The tag it builds on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// Digest of the manifest it builds on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_content_hash: Option<String>,
    /// Number of ancestors.
    pub chain_depth: u32,
    /// Tags that build directly on this one.
    pub dependents: Vec<String>,
    /// Tags this one builds on, the oldest first.
    pub ancestors: Vec<String>,
    /// Digest of the manifest *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_hash: Option<String>,
    /// Bytes on disk of its disk layers *(extension)*.
    #[serde(default)]
    pub disk_physical_bytes: u64,
    /// Bytes on disk that no other snapshot shares *(extension)*.
    #[serde(default)]
    pub unique_bytes: u64,
    /// Number of vCPUs *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// The image its disk began as *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Number of disk layers *(extension)*.
    #[serde(default)]
    pub disk_layers: u32,
    /// Number of memory layers *(extension)*.
    #[serde(default)]
    pub memory_layers: u32,
    /// Labels *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// Body of `POST /v1/snapshots/{tag}/compact`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CompactRequest {
    /// The name of the flat copy.
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub to: String,
}

/// Answer of `GET /v1/store`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreUsage {
    /// Where the store lies on the host.
    pub dir: String,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Number of content-addressed files.
    pub blobs: u64,
    /// Bytes they take on disk.
    pub physical_bytes: u64,
    /// Bytes they describe.
    pub logical_bytes: u64,
    /// Bytes free on that file system.
    pub free_bytes: u64,
    /// Bytes that they may take on disk for one more to be made; no limit if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
}

/// Answer of `POST /v1/store/fsck`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FsckReport {
    /// Number of snapshots looked at.
    pub snapshots: u64,
    /// Number of files whose digest was computed again.
    pub blobs_checked: u64,
    /// What is wrong, one sentence each.
    pub problems: Vec<String>,
    /// What was put right, one sentence each.
    pub repaired: Vec<String>,
}
