//! Counters of the socket device.

use crate::metrics::counters;

counters! {
    /// Counters of the socket device.
    pub struct VsockMetrics {
        /// Packets from the guest.
        packets_from_guest,
        /// Bytes of data from the guest.
        bytes_from_guest,
        /// Packets to the guest.
        packets_to_guest,
        /// Bytes of data to the guest.
        bytes_to_guest,
        /// Connections that clients opened.
        host_connections,
        /// Connections that the guest opened.
        guest_connections,
        /// Connections open now.
        open,
        /// Connections ended by a reset, in either direction.
        connection_resets,
        /// Clients that did not ask properly.
        bad_clients,
        /// Packets that belong nowhere.
        bad_packets,
        /// Connections refused because there are too many.
        refused,
    }
}
