//! One block request, parsed and carried out.
//!
//! Data passes through a bounce buffer, since guest memory must not be referenced. An invalid request is
//! answered with an error; only a chain without room for its status stops the device.

use std::io;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::BlockMetrics;
use crate::disk::{Disk, SECTOR};
use crate::virtio::{Chain, ChainReader, ChainWriter, DeviceError, Verdict};
use crate::{GuestMemory, Registrar};

/// Length of the serial number.
pub(super) const SERIAL_LEN: usize = VIRTIO_BLK_ID_BYTES as usize;
/// The most ranges of one discard.
pub(super) const MAX_RANGES: u32 = 32;
/// The most sectors of one range of a discard: 2 GiB.
pub(super) const MAX_RANGE_SECTORS: u32 = 1 << 22;
/// The most buffers of one request.
pub(super) const MAX_SEGMENTS: u32 = 126;
/// The most bytes of one buffer.
pub(super) const MAX_SEGMENT: u32 = 512 << 10;
/// No request that keeps to the limits above is larger.
const MAX_REQUEST: usize = 64 << 20;
/// Data passes through a buffer of this size.
pub(super) const BOUNCE: usize = 256 << 10;

const HEADER_LEN: usize = 16;
const STATUS_LEN: usize = 1;
const RANGE_LEN: usize = 16;
/// Cost of a discarded range for the host, in bytes written: file system metadata, or one layer block.
const RANGE_WEIGHT: u64 = 64 << 10;

/// Why a request was not carried out.
#[derive(Debug)]
pub(super) enum Refusal {
    /// An I/O error.
    Io(io::Error),
    /// The request makes no sense for this disk.
    Invalid,
    Unsupported,
    /// A pause waits. The request is carried out again afterwards.
    Paused,
    /// The chain itself is unusable.
    Device(DeviceError),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl<T: Into<DeviceError>> From<T> for Refusal {
    fn from(error: T) -> Self {
        Self::Device(error.into())
    }
}

/// The disk and buffers that a request works with.
pub(super) struct Worker<'a> {
    pub(super) disk: &'a mut dyn Disk,
    pub(super) serial: &'a [u8; SERIAL_LEN],
    pub(super) bounce: &'a mut Vec<u8>,
    pub(super) metrics: &'a BlockMetrics,
    pub(super) events: &'a Registrar,
}

/// How many bytes a request counts for the rate limit: those it moves, and `RANGE_WEIGHT` for each range
/// that it discards or fills with zeroes.
pub(super) fn weight(memory: &GuestMemory, chain: &Chain) -> u64 {
    let mut reader = chain.reader(memory);
    let moved = (reader.left() + chain.writer(memory).left()) as u64;
    let kind = reader.array().map(u32::from_le_bytes);
    let ranges = match kind {
        Ok(VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES) => {
            chain.reader(memory).left().saturating_sub(HEADER_LEN) / RANGE_LEN
        }
        _ => 0,
    };
    moved + ranges.min(MAX_RANGES as usize) as u64 * RANGE_WEIGHT
}

impl Worker<'_> {
    /// Carries a request out and writes its status. An error is one the device cannot answer.
    pub(super) fn run(
        &mut self,
        memory: &GuestMemory,
        chain: &Chain,
    ) -> Result<Verdict, DeviceError> {
        let mut reader = chain.reader(memory);
        let mut writer = chain.writer(memory);
        if writer.left() < STATUS_LEN {
            return Err(DeviceError::Protocol(
                "a disk request has no room for its status",
            ));
        }
        let status = match self.carry_out(&mut reader, &mut writer) {
            Ok(()) => VIRTIO_BLK_S_OK,
            Err(Refusal::Unsupported) => VIRTIO_BLK_S_UNSUPP,
            Err(Refusal::Device(error)) => return Err(error),
            Err(Refusal::Paused) => return Ok(Verdict::Again),
            Err(Refusal::Invalid) => {
                self.metrics.errors.inc();
                VIRTIO_BLK_S_IOERR
            }
            Err(Refusal::Io(error)) => {
                self.metrics.errors.inc();
                if error.kind() == io::ErrorKind::StorageFull {
                    self.metrics.no_space.inc();
                }
                VIRTIO_BLK_S_IOERR
            }
        };
        writer.skip(writer.left() - STATUS_LEN)?;
        // The three values of a status fit in a byte.
        writer.write(&[status as u8])?;
        Ok(Verdict::Used(writer.written()))
    }

    fn carry_out(
        &mut self,
        reader: &mut ChainReader<'_>,
        writer: &mut ChainWriter<'_>,
    ) -> Result<(), Refusal> {
        let kind = u32::from_le_bytes(reader.array()?);
        let _priority: [u8; 4] = reader.array()?;
        let sector = u64::from_le_bytes(reader.array()?);
        match kind {
            VIRTIO_BLK_T_IN => self.read(sector, writer),
            VIRTIO_BLK_T_OUT => self.write(sector, reader),
            VIRTIO_BLK_T_FLUSH => {
                self.metrics.flushes.inc();
                Ok(self.disk.flush()?)
            }
            VIRTIO_BLK_T_GET_ID => {
                if writer.left() < SERIAL_LEN + STATUS_LEN {
                    return Err(Refusal::Invalid);
                }
                Ok(writer.write(self.serial)?)
            }
            VIRTIO_BLK_T_DISCARD => self.each_range(reader, 0, |worker, offset, len| {
                worker.metrics.discards.inc();
                worker.disk.discard(offset, len)
            }),
            VIRTIO_BLK_T_WRITE_ZEROES => {
                let flags = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
                self.each_range(reader, flags, |worker, offset, len| {
                    worker.metrics.zeroes.inc();
                    worker.disk.write_zeroes(offset, len)
                })
            }
            _ => Err(Refusal::Unsupported),
        }
    }

    /// Where a transfer of `len` bytes lies, if it lies on the disk.
    fn place(&self, sector: u64, len: u64) -> Result<u64, Refusal> {
        let offset = sector.checked_mul(SECTOR).ok_or(Refusal::Invalid)?;
        let end = offset.checked_add(len).ok_or(Refusal::Invalid)?;
        if end > self.disk.size() || !len.is_multiple_of(SECTOR) {
            return Err(Refusal::Invalid);
        }
        Ok(offset)
    }

    fn read(&mut self, sector: u64, writer: &mut ChainWriter<'_>) -> Result<(), Refusal> {
        let len = writer.left() - STATUS_LEN;
        let mut offset = self.place(sector, len as u64)?;
        if len > MAX_REQUEST {
            return Err(Refusal::Invalid);
        }
        let mut left = len;
        while left > 0 {
            let piece = self.piece(left);
            self.disk.read(offset, &mut self.bounce[..piece])?;
            writer.write(&self.bounce[..piece])?;
            offset += piece as u64;
            left -= piece;
        }
        self.metrics.reads.inc();
        self.metrics.read_bytes.add(len as u64);
        Ok(())
    }

    fn write(&mut self, sector: u64, reader: &mut ChainReader<'_>) -> Result<(), Refusal> {
        let len = reader.left();
        let mut offset = self.place(sector, len as u64)?;
        if len > MAX_REQUEST || self.disk.read_only() {
            return Err(Refusal::Invalid);
        }
        let mut left = len;
        while left > 0 {
            let piece = self.piece(left);
            reader.read(&mut self.bounce[..piece])?;
            self.disk.write(offset, &self.bounce[..piece])?;
            offset += piece as u64;
            left -= piece;
        }
        self.metrics.writes.inc();
        self.metrics.write_bytes.add(len as u64);
        Ok(())
    }

    /// The size of the next piece of a transfer; the bounce buffer has at least that size.
    fn piece(&mut self, left: usize) -> usize {
        let piece = left.min(BOUNCE);
        if self.bounce.len() < piece {
            self.bounce.resize(piece, 0);
        }
        piece
    }

    fn each_range(
        &mut self,
        reader: &mut ChainReader<'_>,
        known_flags: u32,
        mut work: impl FnMut(&mut Self, u64, u64) -> io::Result<()>,
    ) -> Result<(), Refusal> {
        if self.disk.read_only() {
            return Err(Refusal::Unsupported);
        }
        let ranges = reader.left() / RANGE_LEN;
        if ranges == 0 || ranges > MAX_RANGES as usize || !reader.left().is_multiple_of(RANGE_LEN) {
            return Err(Refusal::Invalid);
        }
        for _ in 0..ranges {
            // A range may take the host long, and a cut waits for the whole request.
            if self.events.should_yield() {
                return Err(Refusal::Paused);
            }
            let sector = u64::from_le_bytes(reader.array()?);
            let sectors = u32::from_le_bytes(reader.array()?);
            let flags = u32::from_le_bytes(reader.array()?);
            if flags & !known_flags != 0 {
                return Err(Refusal::Unsupported);
            }
            if sectors > MAX_RANGE_SECTORS {
                return Err(Refusal::Invalid);
            }
            let len = u64::from(sectors) * SECTOR;
            let offset = self.place(sector, len)?;
            if len > 0 {
                work(self, offset, len)?;
            }
        }
        Ok(())
    }
}
