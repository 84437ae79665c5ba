//! The file of a disk layer. The daemon creates, merges and stores layers; a VMM reads and writes them.
//!
//! ```text
//!   0        magic "forkdlyr"
//!   8   u32  version
//!   12  u32  block size
//!   16  u64  size of the disk in bytes
//!   24  u64  most bytes of data the layer takes; 0 is no limit
//!   32  u64  where the map begins
//!   40  u64  where data begins
//!   48  u32  CRC-32 of the 48 bytes before
//!   ...      zero up to 4096
//! ```
//!
//! Numbers are little-endian. Then comes the map with two bits for each block (0 absent, 1 data, 2 zero), and
//! then the blocks, each at its own place, in a sparse file. A file with nothing after its header is an empty
//! layer.

use thiserror::Error;

/// The unit of allocation.
pub const BLOCK: u64 = 4096;
/// The largest disk.
pub const MAX_DISK: u64 = 1 << 44;
/// Blocks in one byte of the map.
pub const BLOCKS_PER_MAP_BYTE: u64 = 4;
/// Length of the header.
pub const HEADER_LEN: usize = 4096;
/// The unit a guest addresses.
pub const SECTOR: u64 = 512;

const MAGIC: [u8; 8] = *b"forkdlyr";
const VERSION: u32 = 1;
const CHECKED: usize = 48;

/// Why a layer is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum LayerError {
    /// The magic, the checksum or a field is wrong.
    #[error("a disk layer is damaged: {0}")]
    Damaged(&'static str),
    /// Another version of the format.
    #[error("a disk layer has version {found}, this program knows {VERSION}")]
    Version { found: u32 },
    /// The size is zero, too large or not whole sectors.
    #[error("a disk cannot have {size} bytes")]
    Size { size: u64 },
}

/// The header of a layer file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerHeader {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Most bytes of data the layer takes; 0 is no limit.
    pub max_bytes: u64,
}

impl LayerHeader {
    /// A header for a disk of `size` bytes.
    pub fn new(size: u64, max_bytes: u64) -> Result<Self, LayerError> {
        if size == 0 || size > MAX_DISK || !size.is_multiple_of(SECTOR) {
            return Err(LayerError::Size { size });
        }
        Ok(Self { size, max_bytes })
    }

    /// Number of blocks.
    pub fn blocks(self) -> u64 {
        self.size.div_ceil(BLOCK)
    }

    /// Where the map begins.
    pub fn map_offset(self) -> u64 {
        HEADER_LEN as u64
    }

    /// Length of the map, whole pages.
    pub fn map_len(self) -> u64 {
        self.blocks()
            .div_ceil(BLOCKS_PER_MAP_BYTE)
            .next_multiple_of(BLOCK)
    }

    /// Where data begins.
    pub fn data_offset(self) -> u64 {
        self.map_offset() + self.map_len()
    }

    /// Length of the file.
    pub fn file_len(self) -> u64 {
        self.data_offset() + self.blocks() * BLOCK
    }

    /// The first page of the file.
    pub fn encode(self) -> [u8; HEADER_LEN] {
        let mut page = [0; HEADER_LEN];
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[12..16].copy_from_slice(&(BLOCK as u32).to_le_bytes());
        page[16..24].copy_from_slice(&self.size.to_le_bytes());
        page[24..32].copy_from_slice(&self.max_bytes.to_le_bytes());
        page[32..40].copy_from_slice(&self.map_offset().to_le_bytes());
        page[40..48].copy_from_slice(&self.data_offset().to_le_bytes());
        let sum = crc32fast::hash(&page[..CHECKED]);
        page[CHECKED..CHECKED + 4].copy_from_slice(&sum.to_le_bytes());
        page
    }

    /// Reads the first page of a file, which is not trusted.
    pub fn decode(page: &[u8; HEADER_LEN]) -> Result<Self, LayerError> {
        let word =
            |at: usize| u32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if page[..8] != MAGIC {
            return Err(LayerError::Damaged("it does not begin like one"));
        }
        if crc32fast::hash(&page[..CHECKED]) != word(CHECKED) {
            return Err(LayerError::Damaged("the checksum of its header is wrong"));
        }
        let version = word(8);
        if version != VERSION {
            return Err(LayerError::Version { found: version });
        }
        if u64::from(word(12)) != BLOCK {
            return Err(LayerError::Damaged("its block size is not 4096"));
        }
        let header = Self::new(long(16), long(24))?;
        if long(32) != header.map_offset() || long(40) != header.data_offset() {
            return Err(LayerError::Damaged("its parts are not where they belong"));
        }
        if page[CHECKED + 4..].iter().any(|byte| *byte != 0) {
            return Err(LayerError::Damaged(
                "its header has something after the end",
            ));
        }
        Ok(header)
    }
}

/// Checks a part of a map, which is not trusted: `first` is the block it begins with. Gives the number of
/// blocks with data.
pub fn check_map(bytes: &[u8], first: u64, blocks: u64) -> Result<u64, LayerError> {
    let mut data = 0;
    for (n, byte) in (0..).zip(bytes) {
        let low = byte & 0b0101_0101;
        let high = byte >> 1 & 0b0101_0101;
        if low & high != 0 {
            return Err(LayerError::Damaged("its map has an impossible value"));
        }
        let block = first + n * BLOCKS_PER_MAP_BYTE;
        let inside = blocks.saturating_sub(block).min(BLOCKS_PER_MAP_BYTE);
        if inside < BLOCKS_PER_MAP_BYTE && byte >> (2 * inside) != 0 {
            return Err(LayerError::Damaged("its map goes on after the last block"));
        }
        data += u64::from(low.count_ones());
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_and_a_flipped_bit_does_not() {
        let header = LayerHeader::new(10 << 30, 1 << 20).unwrap();
        let page = header.encode();
        assert_eq!(LayerHeader::decode(&page).unwrap(), header);
        for byte in 0..HEADER_LEN {
            let mut page = page;
            page[byte] ^= 0x10;
            assert!(LayerHeader::decode(&page).is_err(), "byte {byte}");
        }
    }

    #[test]
    fn sizes_that_are_none_are_refused() {
        for size in [0, 511, 513, MAX_DISK + 512, u64::MAX] {
            assert!(LayerHeader::new(size, 0).is_err(), "{size}");
        }
        let odd = LayerHeader::new(512 * 9, 0).unwrap();
        assert_eq!(odd.blocks(), 2);
        assert_eq!(odd.file_len(), 4096 * 4);
    }

    #[test]
    fn maps_with_impossible_values_are_refused() {
        assert_eq!(check_map(&[0b0110_0001, 0], 0, 8), Ok(2));
        assert!(check_map(&[0b1100], 0, 8).is_err());
        assert!(check_map(&[0, 0b0100], 0, 5).is_err());
    }
}
