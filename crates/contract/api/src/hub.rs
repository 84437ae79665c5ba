//! Snapshots on their way between hosts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Treatment of the memory of an artifact.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum MemoryWish {
    /// Take it if this host can run it; else take the disk and boot the parent here.
    #[default]
    Auto,
    /// Take it, or refuse the artifact.
    Require,
    /// Take the disk alone and boot the parent here.
    Never,
}

/// How the daemon makes a snapshot of an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum UnpackWay {
    /// With its memory: children start where the artifact was frozen.
    Load,
    /// The parent is booted here from the base of its disk.
    Boot,
}

/// How an artifact would be unpacked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnpackPlan {
    /// Name that the publisher gave.
    pub name: String,
    /// Digest of the manifest.
    pub digest: String,
    /// Whether the memory is taken.
    pub way: UnpackWay,
    /// Why the memory is not taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Digests of the packs that must be sent.
    pub packs: Vec<String>,
    /// Bytes of those packs.
    pub fetch_bytes: u64,
    /// Bytes of all packs of the artifact.
    pub total_bytes: u64,
    /// Bytes that new content takes on disk.
    pub disk_bytes: u64,
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Who signed the artifact, if the daemon knows signers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signer: Option<String>,
}
