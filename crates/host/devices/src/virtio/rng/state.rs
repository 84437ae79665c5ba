//! The entropy device as plain data.

use serde::{Deserialize, Serialize};

use crate::rate::RateState;

/// The entropy device, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RngState {
    V1 {
        /// Levels of the rate limit.
        rate: RateState,
    },
}
