//! The entropy device.

mod device;
mod event_handler;
mod metrics;
mod state;

pub use device::Rng;
pub use metrics::RngMetrics;
pub use state::RngState;
