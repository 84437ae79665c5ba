//! Sockets between host and guest.
//!
//! On the host side a client connects to a Unix socket, writes `CONNECT <port>\n`, reads `OK <port>\n`, and
//! then has a stream to that port in the guest. A connection that the guest opens is handed to the VMM as
//! one end of a socket pair, except on the ready port, where it is only an announcement.
//!
//! ```text
//!   client ──CONNECT──► Greeting ──REQUEST──► Requested ──RESPONSE──► Open ──RST or both ends shut──► gone
//!   guest  ──REQUEST──────────────────────────────────────────────────►┘                └► draining to the client
//! ```

mod clients;
mod connection;
mod device;
mod event_handler;
mod greeting;
mod metrics;
mod muxer;
mod packet;
mod state;

pub use device::Vsock;
pub use metrics::VsockMetrics;
pub use state::VsockState;
