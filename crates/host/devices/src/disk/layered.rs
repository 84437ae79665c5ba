//! A shared base image with thin layers on it.
//!
//! A read takes each block from the newest layer that has it, and from the base otherwise. Writes go to the top
//! layer. [`DiskStack`] names the frozen layers of one moment, for a roll-back. Frozen layers are never written.

use std::fs::File;
use std::io;
use std::sync::Arc;

use super::layer::Layer;
use super::map::BlockState;
use super::{BLOCK, Disk, DiskError, DiskStats, file_size, read_padded};

/// The frozen layers of a disk at one moment.
#[derive(Debug, Clone)]
pub struct DiskStack(Vec<Arc<Layer>>);

/// A base that is never written and a stack of thin layers, of which only the top one is.
#[derive(Debug)]
pub struct LayeredDisk {
    base: File,
    /// Oldest first; never written.
    frozen: Vec<Arc<Layer>>,
    /// The one that is written; none in a disk that is only read.
    top: Option<Layer>,
    size: u64,
    refused: u64,
}

impl LayeredDisk {
    /// Stacks layers, oldest first, on a base. All have the same size; the base may be smaller and is
    /// zero past its end.
    pub fn new(base: File, layers: Vec<Layer>, read_only: bool) -> Result<Self, DiskError> {
        let size = layers.last().ok_or(DiskError::NoLayers)?.header().size;
        let base_size = file_size(&base)?;
        if base_size > size {
            return Err(DiskError::Mismatch {
                layer: size,
                disk: base_size,
            });
        }
        for layer in &layers {
            if layer.header().size != size {
                return Err(DiskError::Mismatch {
                    layer: layer.header().size,
                    disk: size,
                });
            }
        }
        let mut layers = layers;
        let top = if read_only { None } else { layers.pop() };
        let frozen = layers
            .into_iter()
            .map(|mut layer| {
                layer.freeze();
                Arc::new(layer)
            })
            .collect();
        Ok(Self {
            base,
            frozen,
            top,
            size,
            refused: 0,
        })
    }

    fn depth(&self) -> usize {
        self.frozen.len() + usize::from(self.top.is_some())
    }

    /// A layer by its place, the oldest first.
    fn layer(&self, index: usize) -> Option<&Layer> {
        match self.frozen.get(index) {
            Some(layer) => Some(layer),
            None if index == self.frozen.len() => self.top.as_ref(),
            None => None,
        }
    }

    /// A new, empty top layer that fits this disk.
    fn open_top(&self, layer: File) -> Result<Layer, DiskError> {
        if self.top.is_none() {
            return Err(DiskError::NoLayers);
        }
        let layer = self.open_layer(layer, true)?;
        if !layer.is_empty() {
            return Err(DiskError::NotEmpty);
        }
        Ok(layer)
    }

    /// A layer that fits this disk.
    fn open_layer(&self, layer: File, writable: bool) -> Result<Layer, DiskError> {
        let layer = Layer::open(layer, writable)?;
        if layer.header().size != self.size {
            return Err(DiskError::Mismatch {
                layer: layer.header().size,
                disk: self.size,
            });
        }
        Ok(layer)
    }

    /// Reads through the lowest `depth` layers and the base.
    fn read_below(&self, depth: usize, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let Some(layer) = depth.checked_sub(1).and_then(|index| self.layer(index)) else {
            return read_padded(&self.base, offset, data);
        };
        let end = offset + data.len() as u64;
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let block = at / BLOCK;
            let (state, blocks) = layer.run(block, end.div_ceil(BLOCK) - block);
            let stop = ((block + blocks) * BLOCK).min(end);
            // The run lies inside `rest`, whose length is that of a slice.
            let (piece, tail) = rest.split_at_mut((stop - at) as usize);
            match state {
                BlockState::Absent => self.read_below(depth - 1, at, piece)?,
                BlockState::Data => layer.read(at, piece)?,
                BlockState::Zero => piece.fill(0),
            }
            at = stop;
            rest = tail;
        }
        Ok(())
    }

    fn top(&mut self) -> io::Result<&mut Layer> {
        self.top
            .as_mut()
            .ok_or_else(|| io::Error::from(io::ErrorKind::ReadOnlyFilesystem))
    }

    /// Refuses what the top layer's limit does not allow.
    fn make_room(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let first = offset / BLOCK;
        let count = (offset + len).div_ceil(BLOCK) - first;
        if self.top()?.has_room(first, count) {
            return Ok(());
        }
        self.refused += 1;
        Err(io::Error::from(io::ErrorKind::StorageFull))
    }

    /// Writes a piece that lies inside one block. The rest of a block that is not in the top layer yet
    /// comes from below.
    fn write_inside(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let block = offset / BLOCK;
        if self.top()?.run(block, 1).0 == BlockState::Data {
            return self.top()?.write(offset, data);
        }
        let mut whole = [0; BLOCK as usize];
        self.read_below(self.depth(), block * BLOCK, &mut whole)?;
        let start = (offset % BLOCK) as usize;
        whole[start..start + data.len()].copy_from_slice(data);
        self.top()?.write(block * BLOCK, &whole)
    }

    /// Splits a range into a piece before the first whole block, whole blocks, and a piece after the last.
    fn split(offset: u64, len: u64) -> (u64, u64) {
        let end = offset + len;
        let start = offset.next_multiple_of(BLOCK).min(end);
        let stop = (end / BLOCK * BLOCK).max(start);
        (start, stop)
    }

    fn zero_piece(&mut self, offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let block = offset / BLOCK;
        match self.top()?.run(block, 1).0 {
            BlockState::Zero => Ok(()),
            BlockState::Data => self.top()?.zero_inside(offset, len),
            BlockState::Absent => {
                self.make_room(offset, len)?;
                // A piece of a block is smaller than a block.
                let zeroes = [0; BLOCK as usize];
                self.write_inside(offset, &zeroes[..len as usize])
            }
        }
    }
}

impl Disk for LayeredDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_only(&self) -> bool {
        self.top.is_none()
    }

    fn read(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.read_below(self.depth(), offset, data)
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        self.make_room(offset, data.len() as u64)?;
        let (start, stop) = Self::split(offset, data.len() as u64);
        let (head, rest) = data.split_at((start - offset) as usize);
        let (whole, tail) = rest.split_at((stop - start) as usize);
        for (at, piece) in [(offset, head), (stop, tail)] {
            if !piece.is_empty() {
                self.write_inside(at, piece)?;
            }
        }
        self.top()?.write(start, whole)
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.top {
            Some(top) => top.sync(),
            None => Ok(()),
        }
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        // Pieces of blocks may be left alone.
        let (start, stop) = Self::split(offset, len);
        if start < stop {
            self.top()?.zero(start / BLOCK, (stop - start) / BLOCK)?;
        }
        Ok(())
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let (start, stop) = Self::split(offset, len);
        if start < stop {
            self.top()?.zero(start / BLOCK, (stop - start) / BLOCK)?;
        }
        self.zero_piece(offset, start - offset)?;
        self.zero_piece(stop, offset + len - stop)
    }

    fn prepare_layer(&mut self, layer: &File) -> Result<(), DiskError> {
        let again = layer.try_clone().map_err(DiskError::io("open"))?;
        self.open_top(again)?;
        let top = self.top().map_err(DiskError::io("freeze"))?;
        top.write_map().map_err(DiskError::io("freeze"))
    }

    fn push_layer(&mut self, layer: File) -> Result<(), DiskError> {
        let layer = self.open_top(layer)?;
        let top = self.top().map_err(DiskError::io("freeze"))?;
        // Others may open the frozen layer as soon as this returns. They read it through the same page
        // cache; whether it is durable is for the one who keeps it.
        top.write_map().map_err(DiskError::io("freeze"))?;
        top.freeze();
        if let Some(frozen) = self.top.replace(layer) {
            self.frozen.push(Arc::new(frozen));
        }
        Ok(())
    }

    fn untouched(&self) -> bool {
        self.top.as_ref().is_none_or(Layer::is_empty)
    }

    fn stack(&self) -> Option<DiskStack> {
        Some(DiskStack(self.frozen.clone()))
    }

    fn rewind(&mut self, stack: &DiskStack, layer: File) -> Result<(), DiskError> {
        let layer = self.open_top(layer)?;
        self.frozen.clone_from(&stack.0);
        self.top = Some(layer);
        Ok(())
    }

    fn take_merged(&mut self, merged: File) -> Result<(), DiskError> {
        if self.top.is_none() {
            return Err(DiskError::NoLayers);
        }
        self.frozen = vec![Arc::new(self.open_layer(merged, false)?)];
        Ok(())
    }

    fn stats(&self) -> DiskStats {
        DiskStats {
            layers: self.depth() as u64,
            top_bytes: self.top.as_ref().map_or(0, Layer::data_bytes),
            refused: self.refused,
        }
    }
}

#[cfg(test)]
mod tests;
