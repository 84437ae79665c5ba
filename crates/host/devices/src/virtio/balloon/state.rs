//! The balloon as plain data.

use serde::{Deserialize, Serialize};

/// The balloon, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BalloonState {
    V1 {
        /// Pages the balloon should have.
        target: u32,
        /// Pages in the balloon, as the guest reports them.
        actual: u32,
    },
}
