//! A new, empty disk layer: what the controller writes before it hands the file to a VMM.
//!
//! ```text
//!   0        magic "forkdlyr"
//!   8   u32  version          12  u32  block size
//!   16  u64  size of the disk 24  u64  most bytes of data it takes; 0 is no limit
//!   32  u64  where the map of blocks begins
//!   40  u64  where blocks begin
//!   48  u32  CRC-32 of the 48 bytes before; zero up to 4096
//! ```
//!
//! All numbers are little-endian. The rest of the file is a hole: no block is taken.

const MAGIC: &[u8; 8] = b"forkdlyr";
const VERSION: u32 = 1;
const BLOCK: u64 = 4096;
const BLOCKS_PER_MAP_BYTE: u64 = 4;

/// The first page of an empty layer, and how long its file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmptyLayer {
    /// What the file begins with.
    pub header: Vec<u8>,
    /// The length of the file.
    pub file_len: u64,
}

impl EmptyLayer {
    /// A layer for a disk of `size` bytes that takes at most `max_bytes` of data; 0 is no limit.
    pub fn new(size: u64, max_bytes: u64) -> Self {
        let blocks = size.div_ceil(BLOCK);
        let map_at = BLOCK;
        let map_len = blocks.div_ceil(BLOCKS_PER_MAP_BYTE).next_multiple_of(BLOCK);
        let data_at = map_at + map_len;
        let mut header = Vec::with_capacity(BLOCK as usize);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&(BLOCK as u32).to_le_bytes());
        for number in [size, max_bytes, map_at, data_at] {
            header.extend_from_slice(&number.to_le_bytes());
        }
        let sum = crc32fast::hash(&header);
        header.extend_from_slice(&sum.to_le_bytes());
        header.resize(BLOCK as usize, 0);
        Self {
            header,
            file_len: data_at + blocks * BLOCK,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_a_page_and_the_file_has_room_for_every_block() {
        let layer = EmptyLayer::new(10 * BLOCK + 512, 0);
        assert_eq!(layer.header.len(), 4096);
        assert_eq!(layer.file_len, 4096 + 4096 + 11 * 4096);
    }
}
