//! The socket device as plain data.

use serde::{Deserialize, Serialize};

/// The socket device, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum VsockState {
    V1 {
        /// The context id the guest knows itself by.
        cid: u64,
        /// The next port for a connection from the host.
        next_port: u32,
        /// Connections the guest may believe in: port on the host, port in the guest.
        connections: Vec<(u32, u32)>,
    },
}
