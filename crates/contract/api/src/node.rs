//! One host of a fleet, and the list of all hosts.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The header of every response with the load of the node, in thousandths.
pub const LOAD_HEADER: &str = "x-forkd-load";

/// Response to `GET /v1/node` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeInfo {
    /// Name of the node, part of the IDs of its sandboxes; none for a host alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Version of the daemon.
    pub version: String,
    /// Whether the node takes no new sandboxes.
    pub draining: bool,
    /// The larger of used sandboxes and used memory, in thousandths of what there is.
    pub load: u32,
    /// Number of sandboxes and parents that are built.
    pub sandboxes: u64,
    /// Largest number of sandboxes.
    pub max_sandboxes: u64,
    /// Memory of the host, in MiB.
    pub memory_mib: u64,
    /// Free memory of the host beyond its reserve, in MiB.
    pub free_mib: u64,
    /// Number of processors.
    pub cpus: u32,
}

/// Body of `PATCH /v1/node` *(extension)*.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpdateNode {
    /// Take no new sandboxes (true), or take them again (false). A restart of the daemon ends a drain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<bool>,
}

/// A host of the fleet: an entry of `GET /v1/nodes` of a gateway *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetNode {
    /// Address of its daemon.
    pub url: String,
    /// Whether the gateway reached it last time.
    pub reachable: bool,
    /// Why it was not reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The last description that the node gave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeInfo>,
}
