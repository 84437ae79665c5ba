//! Devices from before virtio: the serial port.

pub mod serial;

pub use serial::{Console, SERIAL_BASE, SERIAL_IRQ, SERIAL_LEN, Serial, SerialSnapshot};
