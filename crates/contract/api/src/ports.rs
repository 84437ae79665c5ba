//! Ports of a sandbox *(extension)*.
//!
//! A port of a guest is reached through the daemon: under a host name of its own, by headers, by a path, or on a host
//! port. [`PortSettings`] says who may use a port and on which host port it is published.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Header that names the sandbox of a request to a port.
pub const SANDBOX_HEADER: &str = "forkd-sandbox-id";
/// Header that names the port of a request to a port.
pub const PORT_HEADER: &str = "forkd-sandbox-port";
/// Header with the access token of a port.
pub const ACCESS_HEADER: &str = "forkd-access-token";
/// Protocol of the `Upgrade` header on the route that connects to a port.
pub const TCP_PROTOCOL: &str = "forkd-tcp";
/// The most ports of one sandbox that have settings.
pub const MAX_PORTS: usize = 64;

/// The clients that may use a port by its host name or by headers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PortAccess {
    /// Clients with a token of the owner of the sandbox.
    #[default]
    Owner,
    /// Clients with the access token of the sandbox, and its owner.
    Token,
    /// Every client that reaches the daemon.
    Public,
}

impl PortAccess {
    /// The access as in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Token => "token",
            Self::Public => "public",
        }
    }
}

/// Body of `PUT /v1/sandboxes/{id}/ports/{port}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PortSettings {
    /// The clients that may use the port; the owner by default.
    #[serde(default)]
    pub access: PortAccess,
    /// Host address on which the port is published, such as `127.0.0.1:8080`. Port 0 takes a free one. Connections to it
    /// need no token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// A port with settings, in a request that starts sandboxes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PortRequest {
    /// The port in the guest.
    #[schema(minimum = 1)]
    pub port: u16,
    /// The clients that may use the port; the owner by default.
    #[serde(default)]
    pub access: PortAccess,
    /// Host address on which the port is published. With several children the host port must be 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
}

/// A port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PortInfo {
    pub port: u16,
    /// A program in the guest listens on the port.
    pub listening: bool,
    /// The guest address on which it listens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The clients that may use the port.
    pub access: PortAccess,
    /// URL under the host name of the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Path of the port on this daemon, for the owner.
    pub path: String,
    /// Host address on which the port is published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Access token for the header `Forkd-Access-Token`, if the access is `token`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}
