//! One thin layer: a sparse file with a header, a block map, and blocks at their own offsets.
//!
//! The block map in memory is the authority. It is written to the file at a flush and when the layer is
//! frozen. A layer has a limit on the bytes of data it takes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use forkd_formats::layer::{BLOCK, HEADER_LEN, LayerError, LayerHeader};
use rustix::fs::SeekFrom;

use super::map::{BlockMap, BlockState, PIECE};
use super::{DiskError, fill_with_zeroes, punch_hole};

/// A thin layer.
#[derive(Debug)]
pub struct Layer {
    file: File,
    header: LayerHeader,
    map: BlockMap,
    writable: bool,
}

impl Layer {
    /// Makes an empty file a layer for a disk of `size` bytes that takes at most `max_bytes` of data, or
    /// any amount if that is 0. The cost does not depend on the size.
    pub fn create(file: File, size: u64, max_bytes: u64) -> Result<Self, DiskError> {
        let header = LayerHeader::new(size, max_bytes)?;
        let metadata = file.metadata().map_err(DiskError::io("look at"))?;
        if !metadata.is_file() {
            return Err(DiskError::NotAFile);
        }
        if metadata.len() != 0 {
            return Err(DiskError::NotEmpty);
        }
        file.write_all_at(&header.encode(), 0)
            .map_err(DiskError::io("write"))?;
        file.set_len(header.file_len())
            .map_err(DiskError::io("extend"))?;
        Ok(Self {
            file,
            header,
            map: BlockMap::new(header.blocks()),
            writable: true,
        })
    }

    /// Opens a layer file, which is not trusted.
    pub fn open(file: File, writable: bool) -> Result<Self, DiskError> {
        let metadata = file.metadata().map_err(DiskError::io("look at"))?;
        if !metadata.is_file() {
            return Err(DiskError::NotAFile);
        }
        if metadata.len() < HEADER_LEN as u64 {
            return Err(LayerError::Damaged("it is too short").into());
        }
        let mut page = [0; HEADER_LEN];
        file.read_exact_at(&mut page, 0)
            .map_err(DiskError::io("read"))?;
        let header = LayerHeader::decode(&page)?;
        if metadata.len() != header.file_len() {
            return Err(LayerError::Damaged("its length is not what its header says").into());
        }
        let map = read_map(&file, header)?;
        Ok(Self {
            file,
            header,
            map,
            writable,
        })
    }

    pub fn header(&self) -> LayerHeader {
        self.header
    }

    /// Whether it has no blocks.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Bytes of data in it.
    pub fn data_bytes(&self) -> u64 {
        self.map.data_blocks() * BLOCK
    }

    pub(super) fn freeze(&mut self) {
        self.writable = false;
    }

    pub(super) fn run(&self, block: u64, limit: u64) -> (BlockState, u64) {
        self.map.run(block, limit)
    }

    /// Reads bytes of blocks that have data.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file
            .read_exact_at(data, self.header.data_offset() + offset)
    }

    /// Whether `count` blocks from `first` on may become data under the layer's limit.
    pub(super) fn has_room(&self, first: u64, count: u64) -> bool {
        if self.header.max_bytes == 0 {
            return true;
        }
        let new = count - self.map.count_data(first, count);
        new == 0 || (self.map.data_blocks() + new).saturating_mul(BLOCK) <= self.header.max_bytes
    }

    /// Writes bytes. All the blocks they are in become data, so the caller covers new ones whole.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        self.file
            .write_all_at(data, self.header.data_offset() + offset)?;
        let first = offset / BLOCK;
        let last = (offset + data.len() as u64 - 1) / BLOCK;
        self.map.set(first, last - first + 1, BlockState::Data);
        Ok(())
    }

    /// Makes whole blocks zero and gives their space back.
    pub(super) fn zero(&mut self, first: u64, count: u64) -> io::Result<()> {
        // The map first: once it says zero, what is left in the file is never read again.
        let had_data = self.map.count_data(first, count) > 0;
        self.map.set(first, count, BlockState::Zero);
        if !had_data {
            return Ok(());
        }
        let at = self.header.data_offset() + first * BLOCK;
        punch_hole(&self.file, at, count * BLOCK).map(drop)
    }

    /// Overwrites a part of data blocks with zeroes.
    pub(super) fn zero_inside(&mut self, offset: u64, len: u64) -> io::Result<()> {
        fill_with_zeroes(&self.file, self.header.data_offset() + offset, len)
    }

    /// Writes the parts of the map that changed, without waiting for the disk.
    pub(super) fn write_map(&mut self) -> io::Result<()> {
        let base = self.header.map_offset();
        let file = &self.file;
        self.map
            .write_dirty(|at, bytes| file.write_all_at(bytes, base + at))
    }

    /// Makes everything durable: the blocks first, then the map that says they are there, so that a map
    /// never speaks of blocks that were lost.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        if !self.writable {
            return Ok(());
        }
        self.file.sync_data()?;
        if self.map.dirty() {
            self.write_map()?;
            self.file.sync_data()?;
        }
        Ok(())
    }
}

impl Drop for Layer {
    fn drop(&mut self) {
        // A layer that is closed in order loses nothing; one that is not is as after a power cut.
        if self.writable {
            let _ = self.write_map();
        }
    }
}

/// Reads the parts of the map that are not holes.
fn read_map(file: &File, header: LayerHeader) -> Result<BlockMap, DiskError> {
    let mut map = BlockMap::new(header.blocks());
    let (start, end) = (header.map_offset(), header.data_offset());
    let mut at = start;
    while at < end {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data / PIECE as u64 * PIECE as u64,
            Err(rustix::io::Errno::NXIO) => break,
            // A file system that does not know its holes has none.
            Err(rustix::io::Errno::INVAL) => at,
            Err(errno) => return Err(DiskError::io("search")(errno.into())),
        };
        if at >= end {
            break;
        }
        let mut piece = [0; PIECE];
        file.read_exact_at(&mut piece, at)
            .map_err(DiskError::io("read"))?;
        let index = usize::try_from((at - start) / PIECE as u64).unwrap_or(usize::MAX);
        map.load(index, &piece)?;
        at += PIECE as u64;
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn file() -> File {
        tempfile::tempfile().unwrap()
    }

    #[test]
    fn a_new_layer_takes_next_to_no_space_whatever_its_size() {
        let handle = file();
        let layer = Layer::create(handle.try_clone().unwrap(), 8 << 40, 0).unwrap();
        drop(layer);
        let metadata = handle.metadata().unwrap();
        assert!(metadata.len() > 8 << 40);
        assert!(
            metadata.blocks() * 512 <= 64 * 1024,
            "{}",
            metadata.blocks()
        );
        assert!(Layer::open(handle, true).unwrap().is_empty());
    }

    #[test]
    fn blocks_survive_a_close() {
        let handle = file();
        let mut layer = Layer::create(handle.try_clone().unwrap(), 1 << 30, 0).unwrap();
        layer.write(5 * BLOCK, &[9; 4096]).unwrap();
        layer.zero(100_000, 3).unwrap();
        drop(layer);
        let layer = Layer::open(handle, false).unwrap();
        assert_eq!(layer.run(5, 10), (BlockState::Data, 1));
        assert_eq!(layer.run(100_000, 10), (BlockState::Zero, 3));
        assert_eq!(layer.data_bytes(), BLOCK);
        let mut data = [0; 4096];
        layer.read(5 * BLOCK, &mut data).unwrap();
        assert_eq!(data, [9; 4096]);
    }

    #[test]
    fn zeroed_blocks_give_their_space_back() {
        let handle = file();
        let mut layer = Layer::create(handle.try_clone().unwrap(), 1 << 30, 0).unwrap();
        layer.write(0, &vec![1; 8 << 20]).unwrap();
        layer.sync().unwrap();
        let full = handle.metadata().unwrap().blocks();
        layer.zero(0, 2048).unwrap();
        layer.sync().unwrap();
        let left = handle.metadata().unwrap().blocks();
        assert!(left * 512 + (7 << 20) < full * 512, "{full} {left}");
    }

    #[test]
    fn files_that_are_no_layers_are_refused() {
        let short = file();
        short.set_len(100).unwrap();
        assert!(Layer::open(short, false).is_err());
        let zeroes = file();
        zeroes.set_len(1 << 20).unwrap();
        assert!(Layer::open(zeroes, false).is_err());

        let cut = file();
        let header = Layer::create(cut.try_clone().unwrap(), 1 << 20, 0)
            .unwrap()
            .header();
        cut.set_len(header.file_len() - 1).unwrap();
        assert!(Layer::open(cut, false).is_err());

        let bad_map = file();
        drop(Layer::create(bad_map.try_clone().unwrap(), 1 << 20, 0).unwrap());
        bad_map.write_all_at(&[0b1100], 4096).unwrap();
        assert!(Layer::open(bad_map, false).is_err());

        let used = file();
        used.set_len(1).unwrap();
        assert!(matches!(
            Layer::create(used, 1 << 20, 0),
            Err(DiskError::NotEmpty)
        ));
    }
}
