//! The serial port, COM1.

mod device;
mod event_handler;
mod metrics;
mod output;
mod state;

pub use device::{SERIAL_BASE, SERIAL_IRQ, SERIAL_LEN, Serial};
pub use metrics::SerialMetrics;
pub use output::Console;
pub use state::SerialSnapshot;
