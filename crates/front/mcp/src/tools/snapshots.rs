//! Tools about snapshots.

use forkd_api::SnapshotStatus;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::call::Call;
use crate::refusal::Refusal;
use crate::tool::{Effect, Set, Tool};

/// No arguments at all.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// A snapshot as a model sees it.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Snapshot {
    /// Name of the snapshot.
    pub tag: String,
    /// `ready`, `writing` or `failed`.
    pub status: String,
    /// Time of creation, in seconds since 1970.
    pub created_at_unix: u64,
    /// Sandbox that was branched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub branched_from: Option<String>,
    /// Tag on which the snapshot is based.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// Pause of the sandbox for the cut, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<u64>,
    /// Why the snapshot cannot be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

fn status(status: SnapshotStatus) -> String {
    serde_json::to_value(status)
        .ok()
        .and_then(|value| value.as_str().map(str::to_owned))
        .unwrap_or_default()
}

impl From<forkd_api::SnapshotInfo> for Snapshot {
    fn from(info: forkd_api::SnapshotInfo) -> Self {
        Self {
            status: status(info.status),
            tag: info.tag,
            created_at_unix: info.created_at_unix,
            branched_from: info.branched_from,
            parent_tag: info.parent_tag,
            pause_ms: info.pause_ms,
            problem: info.warning,
        }
    }
}

/// A list of snapshots.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Snapshots {
    /// The snapshots of the owner, and those that are public.
    pub result: Vec<Snapshot>,
}

/// Implements the tool `list_snapshots`.
pub struct ListSnapshots;

impl Tool for ListSnapshots {
    const NAME: &'static str = "list_snapshots";
    const TITLE: &'static str = "List snapshots";
    const ABOUT: &'static str = "List the frozen machines (snapshots) from which sandboxes can be started. \
        Use the tag of one with status ready in spawn_sandboxes.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Reads;
    type Input = Nothing;
    type Output = Snapshots;

    async fn run(call: &Call<'_>, _: Nothing) -> Result<Snapshots, Refusal> {
        let found = call.client.snapshots().await?;
        Ok(Snapshots {
            result: found.into_iter().map(Into::into).collect(),
        })
    }
}

/// Arguments of the tool `create_snapshot`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateSnapshotInput {
    /// Name of the new snapshot: letters, digits, '.', '_' and '-'.
    #[schemars(length(min = 1, max = 64))]
    tag: String,
    /// Image to boot, by its name; the usual way.
    #[serde(default)]
    image: Option<String>,
    /// Path of a kernel on the daemon's host, instead of an image.
    #[serde(default)]
    kernel: Option<String>,
    /// Path of a root file system on the daemon's host, instead of an image.
    #[serde(default)]
    rootfs: Option<String>,
    /// Accepted for compatibility; has no effect.
    #[serde(default)]
    rw: bool,
    /// Accepted for compatibility; has no effect.
    #[serde(default)]
    tap: Option<String>,
    /// Accepted for compatibility, at most 60; has no effect.
    #[serde(default = "ten")]
    boot_wait_secs: u64,
    /// Command to run before the machine is frozen, such as a package installation.
    #[serde(default)]
    warmup: Vec<String>,
    /// Guest memory in MiB.
    #[serde(default)]
    mem_size_mib: Option<u32>,
    /// Number of vCPUs of the machine.
    #[serde(default)]
    vcpus: Option<u8>,
}

fn ten() -> u64 {
    10
}

/// Implements the tool `create_snapshot`.
pub struct CreateSnapshot;

impl Tool for CreateSnapshot {
    const NAME: &'static str = "create_snapshot";
    const TITLE: &'static str = "Create a snapshot";
    const ABOUT: &'static str = "Boot a machine from an image, run an optional warm-up command in it, and freeze it \
        under a tag. This takes seconds; sandboxes that are started from the tag take milliseconds.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Adds;
    type Input = CreateSnapshotInput;
    type Output = Snapshot;

    async fn run(call: &Call<'_>, input: CreateSnapshotInput) -> Result<Snapshot, Refusal> {
        if input.image.is_none() && input.rootfs.is_none() {
            return Err(Refusal::invalid("image, or kernel and rootfs, is needed"));
        }
        let request = forkd_api::CreateSnapshot {
            tag: input.tag,
            image: input.image,
            kernel: input.kernel,
            rootfs: input.rootfs,
            rw: input.rw,
            tap: input.tap,
            boot_wait_secs: input.boot_wait_secs,
            warmup: input.warmup,
            mem_size_mib: input.mem_size_mib,
            vcpus: input.vcpus,
            ..forkd_api::CreateSnapshot::default()
        };
        Ok(call.client.create_snapshot(&request).await?.into())
    }
}

/// The name of a snapshot.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ByTag {
    /// Tag of the snapshot, as list_snapshots shows it.
    #[schemars(length(min = 1, max = 64))]
    tag: String,
}

/// Details of a snapshot.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Detail {
    /// Name of the snapshot.
    tag: String,
    /// Guest memory in bytes.
    memory_bytes: u64,
    /// Bytes on disk that no other snapshot shares.
    unique_bytes: u64,
    /// Tags on which the snapshot is based, oldest first.
    ancestors: Vec<String>,
    /// Tags that are based directly on it.
    dependents: Vec<String>,
    /// Image of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<String>,
    /// Number of vCPUs of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    vcpus: Option<u8>,
}

/// Implements the tool `snapshot_info`.
pub struct SnapshotInfo;

impl Tool for SnapshotInfo {
    const NAME: &'static str = "snapshot_info";
    const TITLE: &'static str = "Describe a snapshot";
    const ABOUT: &'static str =
        "Describe one snapshot: its size, the snapshots it is based on and those based on it.";
    const SET: Set = Set::All;
    const EFFECT: Effect = Effect::Reads;
    type Input = ByTag;
    type Output = Detail;

    async fn run(call: &Call<'_>, input: ByTag) -> Result<Detail, Refusal> {
        let found = call.client.snapshot(&input.tag).await?;
        Ok(Detail {
            tag: found.tag,
            memory_bytes: found.memory_logical_bytes,
            unique_bytes: found.unique_bytes,
            ancestors: found.ancestors,
            dependents: found.dependents,
            image: found.image,
            vcpus: found.vcpus,
        })
    }
}

/// The name of something that was deleted.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Deleted {
    /// Its name or ID.
    pub name: String,
    /// Always true: a failure is an error.
    pub deleted: bool,
}

/// Implements the tool `delete_snapshot`.
pub struct DeleteSnapshot;

impl Tool for DeleteSnapshot {
    const NAME: &'static str = "delete_snapshot";
    const TITLE: &'static str = "Delete a snapshot";
    const ABOUT: &'static str =
        "Delete a snapshot for ever. A snapshot on which others are based is refused.";
    const SET: Set = Set::All;
    const EFFECT: Effect = Effect::Replaces;
    type Input = ByTag;
    type Output = Deleted;

    async fn run(call: &Call<'_>, input: ByTag) -> Result<Deleted, Refusal> {
        call.client
            .delete_snapshot(&input.tag, false, false)
            .await?;
        Ok(Deleted {
            name: input.tag,
            deleted: true,
        })
    }
}
