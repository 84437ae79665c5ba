//! The virtio-mmio transport, version 2.

mod registers;
mod transport;

pub use transport::{MMIO_WINDOW, MmioTransport, SlotError, queue_count};
