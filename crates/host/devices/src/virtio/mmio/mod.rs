//! The virtio-mmio transport, version 2.

mod access;
mod inner;
mod registers;
mod transport;

pub use transport::{MMIO_WINDOW, MmioTransport, SlotError, queue_count};

#[cfg(test)]
mod tests;
