//! Counters of the network device.

use crate::metrics::counters;

counters! {
    /// Counters of the network device.
    pub struct NetMetrics {
        /// Frames to the guest.
        rx_frames,
        /// Bytes to the guest.
        rx_bytes,
        /// Frames for the guest that did not fit its buffers.
        rx_dropped,
        /// Times frames for the guest had to wait for the rate limit.
        rx_throttled,
        /// Frames from the guest.
        tx_frames,
        /// Bytes from the guest.
        tx_bytes,
        /// Frames from the guest that the back end did not take.
        tx_dropped,
        /// Times frames from the guest had to wait for the rate limit.
        tx_throttled,
    }
}
