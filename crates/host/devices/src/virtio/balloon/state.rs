//! The balloon as plain data.

use serde::{Deserialize, Serialize};

/// The balloon, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BalloonState {
    /// The first.
    V1 {
        /// Pages the balloon should have.
        target: u32,
        /// Pages it has, as the guest says.
        actual: u32,
    },
}
