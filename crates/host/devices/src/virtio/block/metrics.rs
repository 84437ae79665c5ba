//! Counters of a disk.

use crate::metrics::counters;

counters! {
    /// What a disk did.
    pub struct BlockMetrics {
        /// Reads.
        reads,
        /// Bytes read.
        read_bytes,
        /// Writes.
        writes,
        /// Bytes written.
        write_bytes,
        /// Flushes.
        flushes,
        /// Discards.
        discards,
        /// Writes of zeroes.
        zeroes,
        /// Requests that were answered with an error.
        errors,
        /// Of these, the ones for which there was no space.
        no_space,
        /// Times a request had to wait for the rate limit.
        throttled,
        /// Thin layers.
        layers,
        /// Bytes of data in the layer that is written.
        layer_bytes,
    }
}
