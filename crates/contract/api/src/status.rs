//! Health, version and images of a daemon.
//!
//! `/healthz` needs no token; monitoring can use it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::NetworkStatus;

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

/// Response to `GET /v1/status` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DaemonStatus {
    pub isolation: Isolation,
    /// The network engine; missing in a response of an older daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkStatus>,
}

/// The walls between every VMM and its host. The filter of system calls always stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Isolation {
    /// The walls that stand: `namespaces`, `user`, `landlock`, `cgroup`, `memory`, `cpu`, `io`, `pids`.
    pub walls: Vec<String>,
    /// The walls that do not stand.
    pub missing: Vec<MissingWall>,
}

/// A wall that does not stand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MissingWall {
    /// Name of the wall.
    pub wall: String,
    /// Why it does not stand; administrators only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
