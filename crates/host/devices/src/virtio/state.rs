//! Saved state of slots and queues.
//!
//! The state may come from a file, so it is untrusted: queues are checked for size and place in memory before a
//! device is activated with them.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use virtio_queue::{Queue, QueueState};
use vm_memory::{GuestAddress, GuestMemory as _, Permissions};

use super::balloon::BalloonState;
use super::block::BlockState;
use super::net::NetState;
use super::rng::RngState;
use super::vsock::VsockState;
use crate::GuestMemory;

// Bytes of the parts of a split virtqueue.
const DESCRIPTOR: usize = 16;
const AVAIL_ENTRY: usize = 2;
const USED_ENTRY: usize = 8;
/// Flags, index and event index of an available or used ring.
const RING_META: usize = 6;

/// The state of a slot, by version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SlotState {
    V1(SlotStateV1),
}

/// A slot: the transport's registers, the queues and the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotStateV1 {
    /// Virtio device id.
    pub device_type: u32,
    /// Device status register.
    pub status: u32,
    /// Selected half of the device's features.
    pub device_features_sel: u32,
    /// Selected half of the driver's features.
    pub driver_features_sel: u32,
    /// Features that the driver accepted.
    pub driver_features: u64,
    pub queue_sel: u32,
    /// Interrupt status register.
    pub interrupt_status: u32,
    pub config_generation: u32,
    pub queues: Vec<QueueSnapshot>,
    pub device: DeviceState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSnapshot {
    /// Size the driver chose.
    pub size: u16,
    pub ready: bool,
    /// Next entry of the available ring.
    pub next_avail: u16,
    /// Next entry of the used ring.
    pub next_used: u16,
    /// Guest physical address of the descriptor table.
    pub desc_table: u64,
    /// Guest physical address of the available ring.
    pub avail_ring: u64,
    /// Guest physical address of the used ring.
    pub used_ring: u64,
}

impl From<&Queue> for QueueSnapshot {
    fn from(queue: &Queue) -> Self {
        let state = queue.state();
        Self {
            size: state.size,
            ready: state.ready,
            next_avail: state.next_avail,
            next_used: state.next_used,
            desc_table: state.desc_table,
            avail_ring: state.avail_ring,
            used_ring: state.used_ring,
        }
    }
}

impl QueueSnapshot {
    /// A queue of `size` entries that the driver has not set up.
    pub(crate) fn unused(size: u16) -> Self {
        Self {
            size,
            ready: false,
            next_avail: 0,
            next_used: 0,
            desc_table: 0,
            avail_ring: 0,
            used_ring: 0,
        }
    }

    /// The queue, if the state makes sense for one of at most `max_size` entries.
    pub(crate) fn build(
        self,
        max_size: u16,
        event_idx: bool,
        memory: &GuestMemory,
    ) -> Result<Queue, RestoreError> {
        let queue = Queue::try_from(QueueState {
            max_size,
            next_avail: self.next_avail,
            next_used: self.next_used,
            event_idx_enabled: event_idx,
            size: self.size,
            ready: self.ready,
            desc_table: self.desc_table,
            avail_ring: self.avail_ring,
            used_ring: self.used_ring,
        })
        .map_err(RestoreError::Queue)?;
        // Not `Queue::is_valid`, which writes a log line for each queue a guest sets up badly.
        if self.ready && !self.lies_in(memory) {
            return Err(RestoreError::QueueOutsideMemory);
        }
        Ok(queue)
    }

    /// Whether all three rings lie inside guest memory.
    fn lies_in(self, memory: &GuestMemory) -> bool {
        let size = usize::from(self.size);
        [
            (self.desc_table, DESCRIPTOR * size, Permissions::Read),
            (
                self.avail_ring,
                RING_META + AVAIL_ENTRY * size,
                Permissions::Read,
            ),
            (
                self.used_ring,
                RING_META + USED_ENTRY * size,
                Permissions::Write,
            ),
        ]
        .into_iter()
        .all(|(start, len, access)| memory.check_range(GuestAddress(start), len, access))
    }
}

/// Why saved state is refused.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The state is that of another device.
    #[error("the state is of device type {found}, the slot has {wanted}")]
    WrongDevice {
        /// In the state.
        found: u32,
        /// In the slot.
        wanted: u32,
    },
    /// The number of queues differs.
    #[error("the state has {found} queues, the device has {wanted}")]
    QueueCount {
        /// In the state.
        found: usize,
        /// Of the device.
        wanted: usize,
    },
    /// A queue makes no sense.
    #[error("the state of a queue is not valid")]
    Queue(#[source] virtio_queue::Error),
    /// A queue lies outside guest memory.
    #[error("a queue of the state lies outside guest memory")]
    QueueOutsideMemory,
    /// Features were accepted that this device does not offer.
    #[error("the state has features {found:#x}, the device offers {offered:#x}")]
    Features {
        /// In the state.
        found: u64,
        offered: u64,
    },
    /// The status register has an impossible value.
    #[error("the state has an impossible device status {status:#x}")]
    Status { status: u32 },
    /// A field of the device has an impossible value.
    #[error("the state of the device is not valid: {0}")]
    Device(&'static str),
    /// The device did not start with it.
    #[error("the device does not start from the state")]
    Activate(#[source] super::DeviceError),
}

/// The state of a device, by kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceState {
    Rng(RngState),
    Block(BlockState),
    Vsock(VsockState),
    Net(NetState),
    Balloon(BalloonState),
}
