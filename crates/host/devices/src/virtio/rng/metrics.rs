//! Counters of the entropy device.

use crate::metrics::counters;

counters! {
    /// What the entropy device gave out.
    pub struct RngMetrics {
        /// Buffers filled.
        requests,
        /// Bytes given.
        bytes,
        /// Times a request had to wait for the rate limit.
        throttled,
        /// Times the host gave no entropy.
        errors,
    }
}
