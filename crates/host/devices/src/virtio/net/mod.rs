//! The virtio network device.

mod backend;
mod device;
mod event_handler;
mod metrics;
mod state;

pub use device::Net;
pub use metrics::NetMetrics;
pub use state::NetState;
