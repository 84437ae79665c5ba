//! Disks: Firecracker reads and writes one plain file per disk, forkd keeps a base and thin layers.
//!
//! ```text
//!   start   base + frozen layers ──flatten──► flat file ──► Firecracker
//!   cut     flat file, compared with base + frozen layers ──► top layer, which is frozen then
//! ```
//!
//! The flat file belongs to one VM. It shares blocks with the base where the file system can do that. It has no name
//! once Firecracker has opened it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use forkd_devices::disk::{self, Disk, DiskError};
use forkd_formats::layer::{BLOCK, BLOCKS_PER_MAP_BYTE, HEADER_LEN, LayerError, LayerHeader};
use forkd_os::sparse::{self, DataRanges};
use thiserror::Error;

/// Bytes that are compared at one time.
const PIECE: usize = 1 << 20;

/// Why a disk cannot be flattened, or its changes not written.
#[derive(Debug, Error)]
pub enum FlatDiskError {
    /// A file failed.
    #[error("cannot {action} a disk")]
    Io {
        action: &'static str,
        #[source]
        source: io::Error,
    },
    /// A layer is damaged.
    #[error("a disk layer is rejected")]
    Layer(#[from] LayerError),
    /// The layers do not fit together.
    #[error("the layers of a disk are rejected")]
    Stack(#[from] DiskError),
}

impl FlatDiskError {
    fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}

/// A disk of the VM as one file, and the stack that the file came from.
pub struct FlatDisk {
    flat: File,
    /// The base and the layers; the top layer is empty between two cuts. `None` for a disk that is only read.
    stack: Option<Box<dyn Disk>>,
}

impl std::fmt::Debug for FlatDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlatDisk")
            .field("flat", &self.flat)
            .finish_non_exhaustive()
    }
}

impl FlatDisk {
    /// Fills `flat`, a new empty file, with the content of a disk. The last layer of a writable disk is empty and takes
    /// the changes of the next cut.
    pub fn make(
        flat: File,
        base: File,
        layers: Vec<File>,
        read_only: bool,
    ) -> Result<Self, FlatDiskError> {
        sparse::copy(&base, &flat).map_err(FlatDiskError::io("copy the base of"))?;
        for layer in &layers {
            apply(layer, &flat)?;
        }
        let stack = match read_only || layers.is_empty() {
            true => None,
            false => Some(disk::open(base, layers, false)?),
        };
        Ok(Self { flat, stack })
    }

    /// Whether a cut needs a new layer for this disk.
    pub fn writable(&self) -> bool {
        self.stack.is_some()
    }

    /// Writes the changes since the last cut into the top layer. The VM must stand still. Gives the bytes written.
    pub fn write_changes(&mut self) -> Result<u64, FlatDiskError> {
        let Some(stack) = &mut self.stack else {
            return Ok(0);
        };
        let size = stack.size();
        let mut written = 0;
        let (mut now, mut before) = (vec![0; PIECE], vec![0; PIECE]);
        // A hole of the flat file was a hole of the stack: Firecracker never gives blocks back.
        for range in DataRanges::new(&self.flat, 0..size) {
            let range = range.map_err(FlatDiskError::io("walk"))?;
            let mut at = range.start;
            while at < range.end.min(size) {
                let len = (range.end.min(size) - at).min(PIECE as u64);
                // At most `PIECE`.
                let (now, before) = (&mut now[..len as usize], &mut before[..len as usize]);
                self.flat
                    .read_exact_at(now, at)
                    .map_err(FlatDiskError::io("read"))?;
                stack
                    .read(at, before)
                    .map_err(FlatDiskError::io("read a layer of"))?;
                written += changed_blocks(stack.as_mut(), at, now, before)?;
                at += len;
            }
        }
        stack
            .flush()
            .map_err(FlatDiskError::io("write a layer of"))?;
        Ok(written)
    }

    /// Freezes the top layer and puts a new, empty one on it.
    pub fn push_layer(&mut self, layer: File) -> Result<(), FlatDiskError> {
        match &mut self.stack {
            Some(stack) => Ok(stack.push_layer(layer)?),
            None => Ok(()),
        }
    }

    /// Replaces all layers below the top one by one layer that reads the same.
    pub fn take_merged(&mut self, layer: File) -> Result<(), FlatDiskError> {
        match &mut self.stack {
            Some(stack) => Ok(stack.take_merged(layer)?),
            None => Ok(()),
        }
    }
}

/// Writes the blocks that differ, neighbours in one piece.
fn changed_blocks(
    stack: &mut dyn Disk,
    at: u64,
    now: &[u8],
    before: &[u8],
) -> Result<u64, FlatDiskError> {
    let block = BLOCK as usize;
    let differs: Vec<bool> = now
        .chunks(block)
        .zip(before.chunks(block))
        .map(|(now, before)| now != before)
        .collect();
    let mut written = 0;
    let mut first = 0;
    while let Some(start) = differs[first..].iter().position(|changed| *changed) {
        let start = first + start;
        let count = differs[start..].iter().take_while(|changed| **changed);
        let end = start + count.count();
        let bytes = &now[start * block..(end * block).min(now.len())];
        stack
            .write(at + (start * block) as u64, bytes)
            .map_err(FlatDiskError::io("write a layer of"))?;
        written += bytes.len() as u64;
        first = end;
    }
    Ok(written)
}

/// Copies the blocks of one layer into the flat file.
fn apply(layer: &File, flat: &File) -> Result<(), FlatDiskError> {
    let read = || FlatDiskError::io("read a layer of");
    let mut page = [0; HEADER_LEN];
    layer.read_exact_at(&mut page, 0).map_err(read())?;
    let header = LayerHeader::decode(&page)?;
    let present = flat.metadata().map_err(FlatDiskError::io("look at"))?.len();
    if present > header.size {
        return Err(DiskError::Mismatch {
            layer: header.size,
            disk: present,
        }
        .into());
    }
    flat.set_len(header.size)
        .map_err(FlatDiskError::io("enlarge"))?;
    let map = header.map_offset()..header.map_offset() + header.map_len();
    for range in DataRanges::new(layer, map.clone()) {
        let range = range.map_err(read())?;
        // A map of the largest disk has 1 GiB, so it is read in pieces.
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(PIECE as u64);
            let mut bytes = vec![0; len as usize];
            layer.read_exact_at(&mut bytes, at).map_err(read())?;
            let first = (at - map.start) * BLOCKS_PER_MAP_BYTE;
            forkd_formats::layer::check_map(&bytes, first, header.blocks())?;
            for (index, states) in (0..).zip(&bytes).filter(|(_, states)| **states != 0) {
                for place in 0..BLOCKS_PER_MAP_BYTE {
                    let number = first + index * BLOCKS_PER_MAP_BYTE + place;
                    copy_block(layer, flat, header, number, states >> (2 * place) & 3)?;
                }
            }
            at += len;
        }
    }
    Ok(())
}

/// Copies one block by its state in the map: 0 absent, 1 data, 2 zero.
fn copy_block(
    layer: &File,
    flat: &File,
    header: LayerHeader,
    number: u64,
    state: u8,
) -> Result<(), FlatDiskError> {
    if state == 0 {
        return Ok(());
    }
    let mut block = [0; BLOCK as usize];
    let offset = number * BLOCK;
    if state == 1 {
        layer
            .read_exact_at(&mut block, header.data_offset() + offset)
            .map_err(FlatDiskError::io("read a layer of"))?;
    }
    // The last block of a disk may be shorter.
    let len = header.size.saturating_sub(offset).min(BLOCK);
    flat.write_all_at(&block[..len as usize], offset)
        .map_err(FlatDiskError::io("write"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 64 * BLOCK + 512;

    fn layer() -> File {
        let header = LayerHeader::new(SIZE, 0).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&header.encode(), 0).unwrap();
        file.set_len(header.file_len()).unwrap();
        file
    }

    fn base() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE).unwrap();
        file.write_all_at(&[7; 3 * BLOCK as usize], 2 * BLOCK)
            .unwrap();
        file
    }

    fn flat(base: &File, layers: &[&File]) -> FlatDisk {
        let layers = layers.iter().map(|file| file.try_clone().unwrap());
        let (flat, base) = (tempfile::tempfile().unwrap(), base.try_clone().unwrap());
        FlatDisk::make(flat, base, layers.collect(), false).unwrap()
    }

    fn content(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; SIZE as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn changes_of_each_cut_are_in_the_layer_of_that_cut() {
        let (base, first, second, third) = (base(), layer(), layer(), layer());
        let mut disk = flat(&base, &[&first]);
        assert_eq!(disk.write_changes().unwrap(), 0);
        disk.flat.write_all_at(&[1; 100], 10).unwrap();
        // Zeroes over data of the base, and the short block at the end.
        disk.flat
            .write_all_at(&[0; BLOCK as usize], 3 * BLOCK)
            .unwrap();
        disk.flat.write_all_at(&[9; 512], SIZE - 512).unwrap();
        assert_eq!(disk.write_changes().unwrap(), 2 * BLOCK + 512);
        let at_first_cut = content(&disk.flat);
        disk.push_layer(second.try_clone().unwrap()).unwrap();
        disk.flat.write_all_at(&[2; 100], 10).unwrap();
        assert_eq!(disk.write_changes().unwrap(), BLOCK);
        let at_second_cut = content(&disk.flat);
        assert_eq!(content(&flat(&base, &[&first, &third]).flat), at_first_cut);
        let children = flat(&base, &[&first, &second, &third]);
        assert_eq!(content(&children.flat), at_second_cut);
    }

    #[test]
    fn a_damaged_layer_is_rejected() {
        let damaged = layer();
        damaged.write_all_at(b"x", 0).unwrap();
        let made = FlatDisk::make(tempfile::tempfile().unwrap(), base(), vec![damaged], false);
        assert!(matches!(made, Err(FlatDiskError::Layer(_))));
        let larger = tempfile::tempfile().unwrap();
        larger.set_len(SIZE + BLOCK).unwrap();
        let made = FlatDisk::make(tempfile::tempfile().unwrap(), larger, vec![layer()], false);
        assert!(matches!(made, Err(FlatDiskError::Stack(_))));
    }

    #[test]
    fn a_disk_that_is_only_read_takes_no_layer() {
        let mut disk =
            FlatDisk::make(tempfile::tempfile().unwrap(), base(), Vec::new(), true).unwrap();
        assert!(!disk.writable());
        assert_eq!(disk.write_changes().unwrap(), 0);
        assert_eq!(content(&disk.flat), content(&base()));
    }
}
