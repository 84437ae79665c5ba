//! Memory balloon, memory statistics and free-page reporting.

mod device;
mod event_handler;
mod metrics;
mod state;

pub use device::Balloon;
pub use metrics::BalloonMetrics;
pub use state::BalloonState;
