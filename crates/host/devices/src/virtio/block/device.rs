//! The block device: configuration space, life cycle, and layer operations for cuts and roll-backs.
//!
//! Layer operations are called by the control thread with the disk thread stopped.

use std::fs::File;
use std::io;
use std::sync::Arc;

use forkd_vmm_proto::RateLimit;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};

use super::request::{MAX_RANGE_SECTORS, MAX_RANGES, MAX_SEGMENT, MAX_SEGMENTS, SERIAL_LEN};
use super::{BlockMetrics, BlockState};
use crate::Ready;
use crate::disk::{BLOCK, Disk, DiskError, DiskStack, SECTOR};
use crate::metrics::Counters;
use crate::rate::RateLimiter;
use crate::virtio::{
    Activation, DeviceError, DeviceState, FIRST_DEVICE_TOKEN, RestoreError, VirtioDevice,
    add_timer, feature, read_config_bytes,
};

const TYPE: u32 = 2;
const TIMER: u32 = FIRST_DEVICE_TOKEN;
const CONFIG_LEN: usize = 60;
const SECTORS_PER_BLOCK: u32 = (BLOCK / SECTOR) as u32;

/// A disk device.
pub struct Block {
    pub(super) active: Option<Activation>,
    pub(super) disk: Box<dyn Disk>,
    pub(super) serial: [u8; SERIAL_LEN],
    pub(super) limiter: RateLimiter,
    pub(super) bounce: Vec<u8>,
    pub(super) metrics: Arc<BlockMetrics>,
}

impl Block {
    /// A device for a disk. Of the serial number the guest sees the first 20 bytes.
    pub fn new(disk: Box<dyn Disk>, serial: &str, rate: RateLimit) -> io::Result<Self> {
        let block = Self {
            active: None,
            disk,
            serial: padded(serial),
            limiter: RateLimiter::new(rate)?,
            bounce: Vec::new(),
            metrics: Arc::default(),
        };
        block.measure();
        Ok(block)
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.disk.read_only()
    }

    /// Whether the device is the place of a disk that is attached later.
    pub fn is_empty(&self) -> bool {
        self.disk.size() == 0
    }

    /// Gives an empty device its disk. The guest has agreed to the features of a writable disk, so the disk is one. The
    /// caller tells the guest of the new size.
    pub fn attach(&mut self, disk: Box<dyn Disk>, serial: &str) -> Result<(), DiskError> {
        if !self.is_empty() || disk.read_only() {
            return Err(DiskError::InUse);
        }
        self.disk = disk;
        self.serial = padded(serial);
        self.measure();
        Ok(())
    }

    /// Does the fallible part of [`Block::push_layer`].
    pub fn prepare_layer(&mut self, layer: &File) -> Result<(), DiskError> {
        self.disk.prepare_layer(layer)
    }

    /// Freezes what is on the disk and goes on writing into a new, empty layer. To be called with the
    /// loop paused.
    pub fn push_layer(&mut self, layer: File) -> Result<(), DiskError> {
        self.disk.push_layer(layer)?;
        self.measure();
        Ok(())
    }

    /// Whether nothing was written since the last layer was put on.
    pub fn untouched(&self) -> bool {
        self.disk.untouched()
    }

    /// The layers below the one that is written; `None` for a disk without layers.
    pub fn stack(&self) -> Option<DiskStack> {
        self.disk.stack()
    }

    /// Goes back to an earlier [`Block::stack`] of this disk. To be called with the loop paused.
    pub fn rewind(&mut self, stack: &DiskStack, layer: File) -> Result<(), DiskError> {
        self.disk.rewind(stack, layer)?;
        self.measure();
        Ok(())
    }

    /// Takes one layer that reads the same in place of all that lie below the layer that is written.
    pub fn take_merged(&mut self, merged: File) -> Result<(), DiskError> {
        self.disk.take_merged(merged)?;
        self.measure();
        Ok(())
    }

    /// Makes all writes durable.
    pub fn flush(&mut self) -> io::Result<()> {
        self.disk.flush()
    }

    pub(super) fn measure(&self) {
        let stats = self.disk.stats();
        self.metrics.layers.set(stats.layers);
        self.metrics.layer_bytes.set(stats.top_bytes);
    }

    fn sectors(&self) -> u64 {
        self.disk.size() / SECTOR
    }

    fn config(&self) -> [u8; CONFIG_LEN] {
        let mut config = [0; CONFIG_LEN];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.sectors().to_le_bytes());
        put(8, &MAX_SEGMENT.to_le_bytes());
        put(12, &MAX_SEGMENTS.to_le_bytes());
        put(20, &(SECTOR as u32).to_le_bytes());
        // The exponent of sectors in a physical block, which is what a layer allocates.
        put(24, &[SECTORS_PER_BLOCK.trailing_zeros() as u8]);
        put(26, &(SECTORS_PER_BLOCK as u16).to_le_bytes());
        put(36, &MAX_RANGE_SECTORS.to_le_bytes());
        put(40, &MAX_RANGES.to_le_bytes());
        put(44, &SECTORS_PER_BLOCK.to_le_bytes());
        put(48, &MAX_RANGE_SECTORS.to_le_bytes());
        put(52, &MAX_RANGES.to_le_bytes());
        put(56, &[1]);
        config
    }
}

/// The serial number as the guest reads it.
fn padded(serial: &str) -> [u8; SERIAL_LEN] {
    let mut padded = [0; SERIAL_LEN];
    for (to, from) in padded.iter_mut().zip(serial.bytes()) {
        *to = from;
    }
    padded
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u32 {
        TYPE
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[256]
    }

    fn features(&self) -> u64 {
        let common = feature::COMMON
            | 1 << VIRTIO_BLK_F_SIZE_MAX
            | 1 << VIRTIO_BLK_F_SEG_MAX
            | 1 << VIRTIO_BLK_F_BLK_SIZE
            | 1 << VIRTIO_BLK_F_TOPOLOGY
            | 1 << VIRTIO_BLK_F_FLUSH;
        if self.disk.read_only() {
            common | 1 << VIRTIO_BLK_F_RO
        } else {
            common | 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        }
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config(), offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        add_timer(&activation.events, self.limiter.timer(), TIMER)?;
        self.active = Some(activation);
        Ok(())
    }

    fn activation(&self) -> Option<&Activation> {
        self.active.as_ref()
    }

    fn reset(&mut self) {
        if let (Some(active), Some(timer)) = (self.active.take(), self.limiter.timer()) {
            active.events.remove(timer);
        }
    }

    fn on_queue(&mut self, _queue: usize) -> Result<(), DeviceError> {
        self.serve()
    }

    fn on_event(&mut self, token: u32, _ready: Ready) -> Result<(), DeviceError> {
        if token == TIMER {
            self.timer_fired()?;
        }
        Ok(())
    }

    fn save(&self) -> DeviceState {
        DeviceState::Block(BlockState::V1 {
            sectors: self.sectors(),
            rate: self.limiter.save(),
        })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Block(BlockState::V1 { sectors, rate }) = state else {
            return Err(RestoreError::Device("it is not that of a disk"));
        };
        if sectors != self.sectors() {
            return Err(RestoreError::Device("the disk has another size"));
        }
        self.limiter.restore(rate);
        Ok(())
    }

    fn counters(&self) -> Arc<dyn Counters> {
        Arc::clone(&self.metrics) as _
    }
}

#[cfg(test)]
mod tests;
