//! Counters of a disk.

use crate::metrics::counters;

counters! {
    /// Counters of a disk.
    pub struct BlockMetrics {
        reads,
        /// Bytes of all reads.
        read_bytes,
        writes,
        /// Bytes of all writes.
        write_bytes,
        flushes,
        discards,
        /// Writes of zeroes.
        zeroes,
        /// Requests that were answered with an error.
        errors,
        /// Of these, the ones for which there was no space.
        no_space,
        /// Times a request had to wait for the rate limit.
        throttled,
        layers,
        /// Bytes of data in the layer that is written.
        layer_bytes,
    }
}
