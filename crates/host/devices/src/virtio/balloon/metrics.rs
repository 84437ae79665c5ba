//! Counters of the balloon, and memory statistics of the guest.

use crate::metrics::counters;

counters! {
    /// Counters of the balloon, and the last memory statistics of the guest.
    pub struct BalloonMetrics {
        /// Bytes taken from the guest.
        inflated_bytes,
        /// Bytes given back to the guest.
        deflated_bytes,
        /// Bytes the guest reported as free.
        reported_bytes,
        /// Ranges the host could not take.
        errors,
        /// Ranges outside guest memory.
        bad_ranges,
        /// Size of the balloon in bytes, as the guest reports it.
        actual_bytes,
        /// Size of the balloon in bytes, as asked.
        target_bytes,
        /// Bytes the guest has swapped in.
        guest_swap_in,
        /// Bytes the guest has swapped out.
        guest_swap_out,
        /// Page faults that needed I/O.
        guest_major_faults,
        /// Page faults that did not.
        guest_minor_faults,
        /// Bytes unused in the guest.
        guest_free,
        /// Bytes of memory the guest has.
        guest_total,
        /// Bytes the guest could use without swapping.
        guest_available,
        /// Bytes of files the guest keeps in memory.
        guest_caches,
    }
}
