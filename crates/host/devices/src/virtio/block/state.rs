//! A disk device as plain data.

use serde::{Deserialize, Serialize};

use crate::rate::RateState;

/// A disk device, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlockState {
    V1 {
        /// Sectors the guest knows of.
        sectors: u64,
        /// Levels of the rate limit.
        rate: RateState,
    },
}
