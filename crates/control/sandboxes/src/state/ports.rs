//! The stored settings of the ports of a sandbox.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use forkd_api::PortAccess;
use serde::{Deserialize, Serialize};

/// The clients that may use a port by its host name or by headers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Clients with a token of the owner of the sandbox.
    #[default]
    Owner,
    /// Clients with the access token of the sandbox, and its owner.
    Token,
    /// Every client that reaches the daemon.
    Public,
}

impl From<PortAccess> for Access {
    fn from(access: PortAccess) -> Self {
        match access {
            PortAccess::Owner => Self::Owner,
            PortAccess::Token => Self::Token,
            PortAccess::Public => Self::Public,
        }
    }
}

impl From<Access> for PortAccess {
    fn from(access: Access) -> Self {
        match access {
            Access::Owner => Self::Owner,
            Access::Token => Self::Token,
            Access::Public => Self::Public,
        }
    }
}

/// The settings of the ports of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortsRecord {
    /// Access to ports without settings of their own.
    #[serde(default)]
    pub access: Access,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ports: BTreeMap<u16, PortRecord>,
}

/// The settings of one port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortRecord {
    #[serde(default)]
    pub access: Access,
    /// The host address on which the port is published. After the first start its port is not 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<SocketAddr>,
}

impl PortsRecord {
    /// Who may use a port.
    pub fn access(&self, port: u16) -> Access {
        self.ports
            .get(&port)
            .map_or(self.access, |settings| settings.access)
    }

    /// The settings of a fork. A host port belongs to one sandbox, so none is inherited.
    #[must_use]
    pub fn of_fork(&self) -> Self {
        let ports = self.ports.iter().map(|(port, settings)| {
            let settings = PortRecord {
                host: None,
                ..*settings
            };
            (*port, settings)
        });
        Self {
            access: self.access,
            ports: ports.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_stored_and_a_fork_has_no_host_port() {
        let record = PortsRecord {
            access: Access::Owner,
            ports: BTreeMap::from([(
                80,
                PortRecord {
                    access: Access::Public,
                    host: Some("127.0.0.1:8080".parse().unwrap()),
                },
            )]),
        };
        let text = serde_json::to_string(&record).unwrap();
        let back: PortsRecord = serde_json::from_str(&text).unwrap();
        assert_eq!(back, record);
        assert_eq!(
            (back.access(80), back.access(81)),
            (Access::Public, Access::Owner)
        );
        let fork = back.of_fork();
        assert_eq!(
            (fork.access(80), fork.ports[&80].host),
            (Access::Public, None)
        );
    }
}
