//! Devices from before virtio: the serial port, and the keyboard controller that resets the machine.

mod i8042;
pub mod serial;

pub use i8042::{I8042, I8042_BASE, I8042_LEN};
pub use serial::{Console, SERIAL_BASE, SERIAL_IRQ, SERIAL_LEN, Serial, SerialSnapshot};
