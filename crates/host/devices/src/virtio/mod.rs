//! Virtio 1.2 devices behind the MMIO transport.
//!
//! Each device is a folder with the same files: `device` (registers and life cycle), `event_handler` (work on
//! the event loop), `state` (saved form), `metrics`. [`VirtioDevice`] states the contract of a device,
//! [`MmioTransport`] is a slot, [`Activation`] what a running device works with. Input from the guest is
//! hostile: an invalid ring or chain stops that device until its driver resets it.

pub mod balloon;
pub mod block;
mod chain;
mod interrupt;
mod mmio;
pub mod net;
pub mod rng;
mod state;
pub mod vsock;

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use thiserror::Error;
use virtio_queue::{Queue, QueueT};

use crate::metrics::Counters;
use crate::{EventFd, GuestMemory, Ready, Registrar};

pub use chain::{Chain, ChainError, ChainReader, ChainWriter, QueueExt};
pub use interrupt::Interrupt;
pub use mmio::{MMIO_WINDOW, MmioTransport, SlotError, queue_count};
pub use state::{DeviceState, QueueSnapshot, RestoreError, SlotState, SlotStateV1};

/// The feature bits that the transport and the queues bring along.
pub mod feature {
    /// Descriptors may point to a table of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Both sides name the index from which on they want a notification.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The device is not a legacy one.
    pub const VERSION_1: u64 = 1 << 32;
    /// Features that every device offers.
    pub const COMMON: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1;
}

/// Tokens below this are queue numbers; a device uses the ones from here on for its own descriptors.
pub const FIRST_DEVICE_TOKEN: u32 = 64;

/// The most chains of one queue in a row, so that a driver that never stops does not starve the others.
const MAX_TURNS: u32 = 512;

/// Result of handling a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The chain is done, with this many bytes written into it.
    Used(u32),
    /// The chain stays available; the device comes back to it by itself.
    Hold,
    /// The chain is not done, because a pause waits. It is carried out from its beginning afterwards, so this
    /// is only for requests that may be repeated.
    Again,
}

/// The queues, memory and lines of a device whose driver is ready.
#[derive(Debug)]
pub struct Activation {
    pub memory: GuestMemory,
    /// One entry for each queue the device has. One that the driver did not set up is not ready; the
    /// ready ones lie inside guest memory.
    pub queues: Vec<Queue>,
    /// The way to interrupt the guest.
    pub interrupt: Arc<Interrupt>,
    /// The negotiated features.
    pub features: u64,
    /// Where to register descriptors.
    pub events: Registrar,
    /// The doorbell of each queue.
    pub doorbells: Arc<[EventFd]>,
}

impl Activation {
    /// Whether a feature was negotiated.
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Rings a queue's own doorbell, to come back to it after the others have had their turn.
    pub fn again(&self, queue: usize) {
        if let Some(doorbell) = self.doorbells.get(queue) {
            // An eventfd that is open can always be raised.
            let _ = doorbell.signal();
        }
    }

    /// Takes the available chains of a queue one by one, until there is none, `handle` holds one back, or
    /// others should have their turn. Notifies the driver at the end if it wants that.
    pub fn drain(
        &mut self,
        index: usize,
        mut handle: impl FnMut(&GuestMemory, &Chain) -> Result<Verdict, DeviceError>,
    ) -> Result<(), DeviceError> {
        let mut used = false;
        let mut turns = 0;
        loop {
            if turns == MAX_TURNS || self.events.should_yield() {
                self.again(index);
                break;
            }
            turns += 1;
            let queue = self.queues.get_mut(index).ok_or(DeviceError::NoQueue)?;
            let Some(chain) = queue.next_chain(&self.memory)? else {
                // From here on the driver rings again; what came in between is looked at now.
                if queue.enable_notification(&self.memory)? {
                    continue;
                }
                break;
            };
            match handle(&self.memory, &chain)? {
                Verdict::Used(len) => queue.finish(&self.memory, &chain, len)?,
                Verdict::Hold => {
                    queue.put_back();
                    break;
                }
                Verdict::Again => {
                    queue.put_back();
                    self.again(index);
                    break;
                }
            }
            used = true;
        }
        if used {
            self.notify(index)?;
        }
        Ok(())
    }

    /// Tells the driver about used buffers if it wants to know.
    pub fn notify(&mut self, queue: usize) -> Result<(), DeviceError> {
        let queue = self.queues.get_mut(queue).ok_or(DeviceError::NoQueue)?;
        if queue.needs_notification(&self.memory)? {
            self.interrupt.used_buffer();
        }
        Ok(())
    }
}

/// Why a device cannot go on. It then stands still until the driver resets it.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// A ring is unusable.
    #[error("a virtqueue is unusable")]
    Queue(#[from] virtio_queue::Error),
    /// A descriptor chain makes no sense.
    #[error("a descriptor chain is malformed")]
    Chain(#[from] ChainError),
    /// A queue the device cannot work without was not set up.
    #[error("a queue is not set up")]
    NoQueue,
    /// A request breaks the device's own protocol.
    #[error("the driver broke the protocol: {0}")]
    Protocol(&'static str),
    /// The host side of the device failed.
    #[error("the back end failed")]
    Backend(#[source] io::Error),
}

/// A virtio device, without its transport.
///
/// # Life
///
/// ```text
///   new ──restore?──► inactive ──activate──► active ⇄ (loop paused) ──reset──► inactive
/// ```
///
/// All calls come with the slot's lock held, so one at a time, but from different threads:
///
/// - `read_config`, `write_config`, `activate` and `reset` from the vCPU thread that touched the register;
/// - `on_queue`, `on_event` from the device thread, only while active;
/// - `save` from the control thread, only while the event loop is paused and the vCPUs are stopped;
/// - `restore` from the control thread, only while inactive.
///
/// # Pause
///
/// Devices do their I/O synchronously, inside `on_queue` and `on_event`. When the loop is paused, no
/// device is inside one of them, nothing is in flight, and every buffer is either still in the available
/// ring or already in the used ring. A device must return from a long run over a queue when
/// [`Registrar::should_yield`] says so, after ringing [`Activation::again`], and from a long request with
/// [`Verdict::Again`]. Resuming needs no call: descriptors that became ready meanwhile are reported then.
pub trait VirtioDevice: Any + Send {
    /// The virtio device id.
    fn device_type(&self) -> u32;

    /// The largest size of each queue, powers of two.
    fn queue_sizes(&self) -> &'static [u16];

    /// The features offered, [`feature::COMMON`] among them.
    fn features(&self) -> u64;

    /// Reads configuration space; what lies outside reads as zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes configuration space; what cannot be written is ignored.
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let _ = (offset, data);
    }

    /// The driver is ready. On an error the device is not active.
    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError>;

    /// The activation, while the device is active.
    fn activation(&self) -> Option<&Activation>;

    /// Back to the state before activation: nothing registered, no queue, no connection. Also called
    /// after the device failed.
    fn reset(&mut self);

    /// The driver rang the doorbell of a queue.
    fn on_queue(&mut self, queue: usize) -> Result<(), DeviceError>;

    /// A descriptor that the device registered is ready.
    fn on_event(&mut self, token: u32, ready: Ready) -> Result<(), DeviceError> {
        let _ = (token, ready);
        Ok(())
    }

    /// The device's own state, without its queues.
    fn save(&self) -> DeviceState;

    /// Takes over saved state, which is not to be trusted. Followed by `activate` if the device was
    /// active when it was saved.
    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError>;

    /// The device's counters.
    fn counters(&self) -> Arc<dyn Counters>;
}

/// Copies the part of `config` at `offset` into `data`; what lies outside reads as zero.
pub(crate) fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    data.fill(0);
    let Some(tail) = usize::try_from(offset).ok().and_then(|o| config.get(o..)) else {
        return;
    };
    let len = tail.len().min(data.len());
    data[..len].copy_from_slice(&tail[..len]);
}

/// Registers a limiter's timer, if it has one.
pub(crate) fn add_timer(
    events: &Registrar,
    timer: Option<BorrowedFd<'_>>,
    token: u32,
) -> Result<(), DeviceError> {
    match timer {
        Some(timer) => events
            .add(timer, token, Ready::IN)
            .map_err(DeviceError::Backend),
        None => Ok(()),
    }
}
