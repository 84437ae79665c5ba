//! A disk device as plain data.

use serde::{Deserialize, Serialize};

use crate::rate::RateState;

/// A disk device, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlockState {
    /// The first.
    V1 {
        /// Sectors the guest knows of.
        sectors: u64,
        /// What is left of the rate.
        rate: RateState,
    },
}
