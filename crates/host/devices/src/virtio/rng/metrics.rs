//! Counters of the entropy device.

use crate::metrics::counters;

counters! {
    /// Counters of the entropy device.
    pub struct RngMetrics {
        /// Buffers that were filled.
        requests,
        /// Bytes of entropy given.
        bytes,
        /// Times a request had to wait for the rate limit.
        throttled,
        /// Times the host gave no entropy.
        errors,
    }
}
