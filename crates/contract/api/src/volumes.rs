//! Volumes: named disks that outlive the sandboxes that use them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a sandbox uses a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolumeMode {
    /// The sandbox writes the volume; no other sandbox does at the same time.
    #[default]
    Rw,
    /// The sandbox reads the last state; any number of sandboxes may.
    Ro,
    /// The sandbox writes a copy of its own, which is thrown away unless it is committed.
    Clone,
}

/// A volume of a new sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeMount {
    /// Name of the volume.
    pub name: String,
    /// Absolute path in the guest; it is made if it is missing.
    #[schema(min_length = 2, max_length = 1024, pattern = "^/")]
    pub path: String,
    #[serde(default)]
    pub mode: VolumeMode,
}

/// Body of `POST /v1/volumes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    #[schema(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    pub name: String,
    /// Size in MiB, 8 to 1048576.
    #[serde(default = "gibibyte")]
    #[schema(minimum = 8, maximum = 1048576, default = 1024)]
    pub size_mib: u64,
}

fn gibibyte() -> u64 {
    1024
}

/// A disk that outlives sandboxes, as the API shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeInfo {
    pub name: String,
    pub owner: String,
    pub size_mib: u64,
    /// Time of creation, in seconds since 1970.
    pub created_at_unix: u64,
    /// Counts the changes of the content.
    pub generation: u64,
    /// Layers over the empty disk.
    pub layers: u32,
    /// Whether the last writer unmounted the volume. Without that, the mode `ro` is refused until a sandbox has mounted
    /// the volume for writing.
    pub clean: bool,
    /// The sandbox that writes it.
    #[schema(required)]
    pub writer: Option<String>,
}
