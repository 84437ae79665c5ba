//! Block devices: disks over a raw image or thin layers.

mod device;
mod event_handler;
mod metrics;
mod request;
mod state;

pub use device::Block;
pub use metrics::BlockMetrics;
pub use state::BlockState;
