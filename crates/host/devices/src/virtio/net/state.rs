//! The network device as plain data.

use serde::{Deserialize, Serialize};

use crate::rate::RateState;

/// The network device, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetState {
    /// The first version.
    V1 {
        /// The hardware address that the driver has read.
        mac: [u8; 6],
        /// The rest of the rate to the guest.
        rx_rate: RateState,
        /// The rest of the rate from the guest.
        tx_rate: RateState,
    },
}
