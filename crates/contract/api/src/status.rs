//! Health, version and images of a daemon.
//!
//! `/healthz` needs no token; monitoring can use it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Response to `GET /healthz`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// Whether the daemon can serve requests.
    pub ok: bool,
    /// Problems of the daemon, one sentence each *(extension)*.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// Response to `GET /version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    /// Version of the daemon.
    pub version: String,
    /// Version of the API, `v1`.
    pub api: String,
}

/// An image from which parents can be built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageInfo {
    /// Name for snapshot requests.
    pub name: String,
    /// Path on the host.
    pub dir: String,
    /// Size that the guest sees, in bytes.
    pub logical_bytes: u64,
    /// Space on the host, in bytes.
    pub physical_bytes: u64,
}
