//! The network device as plain data.

use serde::{Deserialize, Serialize};

use crate::rate::RateState;

/// The network device, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetState {
    /// The first.
    V1 {
        /// The hardware address that the driver has read.
        mac: [u8; 6],
        /// What is left of the rate to the guest.
        rx_rate: RateState,
        /// What is left of the rate from the guest.
        tx_rate: RateState,
    },
}
