//! Counters of the serial port.

use crate::metrics::counters;

counters! {
    /// Counters of the serial port.
    pub struct SerialMetrics {
        /// Bytes the guest printed.
        printed,
        /// Bytes written to the console.
        written,
        /// Bytes over the rate, or for which there was no room, or past the console's size.
        dropped,
        /// Writes to the console that failed.
        write_errors,
        /// Bytes given to the guest.
        fed,
    }
}
