//! Health, version and images.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Answer of `GET /healthz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// The daemon can serve requests.
    pub ok: bool,
    /// What does not work, if something does not *(extension)*.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// Answer of `GET /version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// The version of the daemon.
    pub version: String,
    /// The version of the API, `v1`.
    pub api: String,
}

/// An image that parents can be built from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// The name a snapshot request gives.
    pub name: String,
    /// Where it lies on the host.
    pub dir: String,
    /// Size the guest sees.
    pub logical_bytes: u64,
    /// Space it takes on the host.
    pub physical_bytes: u64,
}
