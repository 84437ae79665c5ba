//! The interrupt line of a device and its status register.
//!
//! Raising and acknowledging take no lock, so a vCPU that acknowledges never waits for a busy device.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::EventFd;

const USED_BUFFER: u32 = 1;
const CONFIG_CHANGE: u32 = 2;

/// An interrupt line with its status register. Raising and acknowledging take no lock.
#[derive(Debug)]
pub struct Interrupt {
    status: AtomicU32,
    line: EventFd,
    generation: AtomicU32,
}

impl Interrupt {
    pub(crate) fn new(line: EventFd) -> Self {
        Self {
            status: AtomicU32::new(0),
            line,
            generation: AtomicU32::new(0),
        }
    }

    /// The eventfd that KVM listens to.
    pub fn line(&self) -> &EventFd {
        &self.line
    }

    /// Buffers have been used.
    pub fn used_buffer(&self) {
        self.raise(USED_BUFFER);
    }

    /// Configuration space has changed.
    pub fn config_change(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.raise(CONFIG_CHANGE);
    }

    fn raise(&self, bits: u32) {
        self.status.fetch_or(bits, Ordering::AcqRel);
        // An eventfd that is open can always be raised.
        let _ = self.line.signal();
    }

    pub(crate) fn status(&self) -> u32 {
        self.status.load(Ordering::Acquire)
    }

    pub(crate) fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::AcqRel);
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn reset(&self) {
        self.status.store(0, Ordering::Release);
    }

    /// Takes over a saved status. An interrupt that was on its way when the state was saved is raised
    /// again; one too many does no harm.
    pub(crate) fn restore(&self, status: u32, generation: u32) {
        self.status
            .store(status & (USED_BUFFER | CONFIG_CHANGE), Ordering::Release);
        self.generation.store(generation, Ordering::Release);
        if self.status() != 0 {
            let _ = self.line.signal();
        }
    }
}
