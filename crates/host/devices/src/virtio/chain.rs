//! Descriptor chains, copied and checked once.
//!
//! [`Chain`] holds the buffers of a request after one pass over the descriptors: inside guest memory, readable
//! before writable, bounded in number. Descriptors are never read twice, so a guest cannot change them after
//! the check. Buffer contents may change at any time and are copied before they are parsed.

use std::ops::Deref;

use thiserror::Error;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory as _, Permissions};

use super::DeviceError;
use crate::GuestMemory;

/// The most buffers in one chain. Drivers stay below the queue size; an indirect table could be longer.
const MAX_SEGMENTS: usize = 1024;

/// Why a chain is invalid.
#[derive(Debug, Error, PartialEq, Eq, Clone, Copy)]
pub enum ChainError {
    /// The head, a link or an indirect table points nowhere, or the chain loops.
    #[error("a descriptor is out of range or the chain loops")]
    Broken,
    /// A buffer lies outside guest memory.
    #[error("a buffer lies outside guest memory")]
    OutsideMemory,
    /// A buffer for the driver comes before one for the device.
    #[error("a readable buffer follows a writable one")]
    Order,
    /// More buffers than any driver sends.
    #[error("a chain has more than {MAX_SEGMENTS} buffers")]
    TooLong,
    /// The chain is shorter than what it must hold.
    #[error("a chain is too short")]
    TooShort,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    addr: GuestAddress,
    len: usize,
}

/// A chain whose buffers are all inside guest memory, readable ones first.
#[derive(Debug, Default)]
pub struct Chain {
    head: u16,
    readable: Vec<Segment>,
    writable: Vec<Segment>,
}

impl Chain {
    fn parse<M>(memory: &GuestMemory, mut chain: DescriptorChain<M>) -> Result<Self, ChainError>
    where
        M: Deref<Target = GuestMemory>,
    {
        let mut parsed = Self {
            head: chain.head_index(),
            ..Self::default()
        };
        let mut ended = false;
        for descriptor in chain.by_ref() {
            let segment = Segment {
                addr: descriptor.addr(),
                len: descriptor.len() as usize,
            };
            let (list, permission) = if descriptor.is_write_only() {
                (&mut parsed.writable, Permissions::Write)
            } else if parsed.writable.is_empty() {
                (&mut parsed.readable, Permissions::Read)
            } else {
                return Err(ChainError::Order);
            };
            if segment.len > 0 {
                if !memory.check_range(segment.addr, segment.len, permission) {
                    return Err(ChainError::OutsideMemory);
                }
                list.push(segment);
            }
            if parsed.readable.len() + parsed.writable.len() > MAX_SEGMENTS {
                return Err(ChainError::TooLong);
            }
            ended = !descriptor.has_next();
        }
        // The iterator ends silently at a link it cannot follow; a whole chain ends at a descriptor that
        // says so.
        if ended {
            Ok(parsed)
        } else {
            Err(ChainError::Broken)
        }
    }

    /// The number the chain is returned under.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Where the buffers for the device to write are, and how long.
    pub fn writable(&self) -> impl Iterator<Item = (u64, u64)> {
        self.writable.iter().map(|s| (s.addr.0, s.len as u64))
    }

    /// A reader of the buffers that the driver has filled.
    pub fn reader<'a>(&'a self, memory: &'a GuestMemory) -> ChainReader<'a> {
        ChainReader(Cursor::new(memory, &self.readable))
    }

    /// A writer into the buffers for the answer.
    pub fn writer<'a>(&'a self, memory: &'a GuestMemory) -> ChainWriter<'a> {
        ChainWriter {
            cursor: Cursor::new(memory, &self.writable),
            written: 0,
        }
    }
}

#[derive(Debug, Clone)]
struct Cursor<'a> {
    memory: &'a GuestMemory,
    segments: &'a [Segment],
    /// Bytes of the first segment that are used up.
    used: usize,
    left: usize,
}

impl<'a> Cursor<'a> {
    fn new(memory: &'a GuestMemory, segments: &'a [Segment]) -> Self {
        Self {
            memory,
            segments,
            used: 0,
            left: segments.iter().map(|s| s.len).sum(),
        }
    }

    /// The next piece of at most `limit` bytes, stepping over it.
    fn piece(&mut self, limit: usize) -> Option<Segment> {
        let first = self.segments.first()?;
        let len = (first.len - self.used).min(limit);
        if len == 0 {
            return None;
        }
        let addr = GuestAddress(first.addr.0 + self.used as u64);
        self.used += len;
        self.left -= len;
        if self.used == first.len {
            self.segments = &self.segments[1..];
            self.used = 0;
        }
        Some(Segment { addr, len })
    }
}

/// Reads what the driver sent, in order.
#[derive(Debug, Clone)]
pub struct ChainReader<'a>(Cursor<'a>);

impl ChainReader<'_> {
    /// Bytes not read yet.
    pub fn left(&self) -> usize {
        self.0.left
    }

    /// Reads exactly as much as fits into `data`.
    pub fn read(&mut self, data: &mut [u8]) -> Result<(), ChainError> {
        if self.0.left < data.len() {
            return Err(ChainError::TooShort);
        }
        let mut done = 0;
        while done < data.len() {
            let piece = self
                .0
                .piece(data.len() - done)
                .ok_or(ChainError::TooShort)?;
            self.0
                .memory
                .read_slice(&mut data[done..done + piece.len], piece.addr)
                .map_err(|_| ChainError::OutsideMemory)?;
            done += piece.len;
        }
        Ok(())
    }

    /// Reads an array.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], ChainError> {
        let mut data = [0; N];
        self.read(&mut data)?;
        Ok(data)
    }
}

/// Writes the answer, in order.
#[derive(Debug, Clone)]
pub struct ChainWriter<'a> {
    cursor: Cursor<'a>,
    written: usize,
}

impl ChainWriter<'_> {
    /// Bytes of room left.
    pub fn left(&self) -> usize {
        self.cursor.left
    }

    /// Leaves the next `count` bytes as they are.
    pub fn skip(&mut self, count: usize) -> Result<(), ChainError> {
        if self.cursor.left < count {
            return Err(ChainError::TooShort);
        }
        let mut left = count;
        while left > 0 {
            left -= self.cursor.piece(left).ok_or(ChainError::TooShort)?.len;
        }
        Ok(())
    }

    /// Bytes written so far.
    pub fn written(&self) -> u32 {
        // A chain is at most 2^32 - 1 bytes long.
        u32::try_from(self.written).unwrap_or(u32::MAX)
    }

    /// Writes all of `data`.
    pub fn write(&mut self, data: &[u8]) -> Result<(), ChainError> {
        if self.cursor.left < data.len() {
            return Err(ChainError::TooShort);
        }
        let mut done = 0;
        while done < data.len() {
            let piece = self
                .cursor
                .piece(data.len() - done)
                .ok_or(ChainError::TooShort)?;
            self.cursor
                .memory
                .write_slice(&data[done..done + piece.len], piece.addr)
                .map_err(|_| ChainError::OutsideMemory)?;
            done += piece.len;
        }
        self.written += done;
        Ok(())
    }
}

/// Operations of devices on a queue.
pub trait QueueExt {
    /// The next available chain, checked.
    fn next_chain(&mut self, memory: &GuestMemory) -> Result<Option<Chain>, DeviceError>;
    /// Puts the chain taken last back, to be taken again.
    fn put_back(&mut self);
    /// Returns a chain with `len` bytes written into it.
    fn finish(&mut self, memory: &GuestMemory, chain: &Chain, len: u32) -> Result<(), DeviceError>;
}

impl QueueExt for Queue {
    fn next_chain(&mut self, memory: &GuestMemory) -> Result<Option<Chain>, DeviceError> {
        match self.iter(memory)?.next() {
            Some(chain) => Ok(Some(Chain::parse(memory, chain)?)),
            None => Ok(None),
        }
    }

    fn put_back(&mut self) {
        self.go_to_previous_position();
    }

    fn finish(&mut self, memory: &GuestMemory, chain: &Chain, len: u32) -> Result<(), DeviceError> {
        Ok(self.add_used(memory, chain.head, len)?)
    }
}
