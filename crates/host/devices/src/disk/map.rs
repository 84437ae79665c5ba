//! The block map of a layer: two bits per block (absent, data, zero).
//!
//! In memory the map is split into pieces that exist once they are touched, so a large sparse disk costs little.

use forkd_formats::layer::{BLOCKS_PER_MAP_BYTE, LayerError, check_map};

/// Bytes of one piece of the map; it covers 64 MiB of disk.
pub(super) const PIECE: usize = 4096;

const PER_PIECE: u64 = PIECE as u64 * BLOCKS_PER_MAP_BYTE;

/// State of a block in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockState {
    /// Nothing: look below.
    Absent,
    /// The block is in this layer.
    Data,
    /// The block is zero, whatever is below.
    Zero,
}

impl BlockState {
    fn bits(self) -> u8 {
        match self {
            Self::Absent => 0,
            Self::Data => 1,
            Self::Zero => 2,
        }
    }

    /// A whole byte of it.
    fn byte(self) -> u8 {
        self.bits() * 0b0101_0101
    }
}

#[derive(Debug, Default)]
struct Piece {
    bytes: Option<Box<[u8; PIECE]>>,
    dirty: bool,
}

/// The map of a layer.
#[derive(Debug)]
pub(super) struct BlockMap {
    blocks: u64,
    pieces: Vec<Piece>,
    data_blocks: u64,
    dirty: bool,
}

impl BlockMap {
    /// All blocks absent.
    pub(super) fn new(blocks: u64) -> Self {
        let count = usize::try_from(blocks.div_ceil(PER_PIECE)).unwrap_or(usize::MAX);
        let mut pieces = Vec::new();
        pieces.resize_with(count, Piece::default);
        Self {
            blocks,
            pieces,
            data_blocks: 0,
            dirty: false,
        }
    }

    /// Takes over a piece read from a file, which is not trusted.
    pub(super) fn load(&mut self, index: usize, bytes: &[u8; PIECE]) -> Result<(), LayerError> {
        let first = index as u64 * PER_PIECE;
        let data = check_map(bytes, first, self.blocks)?;
        let piece = self
            .pieces
            .get_mut(index)
            .ok_or(LayerError::Damaged("its map is too long"))?;
        if bytes.iter().any(|byte| *byte != 0) {
            piece.bytes = Some(Box::new(*bytes));
            self.data_blocks += data;
        }
        Ok(())
    }

    /// Number of blocks with data.
    pub(super) fn data_blocks(&self) -> u64 {
        self.data_blocks
    }

    /// Whether all blocks are absent.
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.iter().all(|piece| piece.bytes.is_none())
    }

    fn piece(&self, block: u64) -> Option<&Piece> {
        self.pieces.get(usize::try_from(block / PER_PIECE).ok()?)
    }

    /// The state of a block and how many blocks from it on, at most `limit`, are in the same state.
    pub(super) fn run(&self, block: u64, limit: u64) -> (BlockState, u64) {
        let state = self.get(block);
        let mut len = 1;
        while len < limit {
            let next = block + len;
            let Some(Piece {
                bytes: Some(bytes), ..
            }) = self.piece(next)
            else {
                if state != BlockState::Absent {
                    break;
                }
                // Nothing in this piece at all.
                len += PER_PIECE - next % PER_PIECE;
                continue;
            };
            let byte = bytes[(next % PER_PIECE / BLOCKS_PER_MAP_BYTE) as usize];
            if next.is_multiple_of(BLOCKS_PER_MAP_BYTE) && byte == state.byte() {
                len += BLOCKS_PER_MAP_BYTE;
            } else if self.get(next) == state {
                len += 1;
            } else {
                break;
            }
        }
        (state, len.min(limit))
    }

    /// The state of a block.
    pub(super) fn get(&self, block: u64) -> BlockState {
        let Some(Piece {
            bytes: Some(bytes), ..
        }) = self.piece(block)
        else {
            return BlockState::Absent;
        };
        let byte = bytes[(block % PER_PIECE / BLOCKS_PER_MAP_BYTE) as usize];
        match byte >> (2 * (block % BLOCKS_PER_MAP_BYTE)) & 3 {
            1 => BlockState::Data,
            0 => BlockState::Absent,
            _ => BlockState::Zero,
        }
    }

    /// How many of `count` blocks from `first` on have data.
    pub(super) fn count_data(&self, first: u64, count: u64) -> u64 {
        let mut data = 0;
        let mut block = first;
        while block < first + count {
            let (state, len) = self.run(block, first + count - block);
            if state == BlockState::Data {
                data += len;
            }
            block += len;
        }
        data
    }

    /// Sets `count` blocks from `first` on.
    pub(super) fn set(&mut self, first: u64, count: u64, state: BlockState) {
        let end = first.saturating_add(count).min(self.blocks);
        let mut block = first;
        while block < end {
            let index = usize::try_from(block / PER_PIECE).unwrap_or(usize::MAX);
            let piece_end = (block / PER_PIECE + 1) * PER_PIECE;
            let stop = end.min(piece_end);
            let Some(piece) = self.pieces.get_mut(index) else {
                return;
            };
            let bytes = piece.bytes.get_or_insert_with(|| Box::new([0; PIECE]));
            while block < stop {
                let byte = &mut bytes[(block % PER_PIECE / BLOCKS_PER_MAP_BYTE) as usize];
                let before = (*byte & 0b0101_0101).count_ones();
                let step = if block.is_multiple_of(BLOCKS_PER_MAP_BYTE)
                    && stop - block >= BLOCKS_PER_MAP_BYTE
                {
                    *byte = state.byte();
                    BLOCKS_PER_MAP_BYTE
                } else {
                    let shift = 2 * (block % BLOCKS_PER_MAP_BYTE);
                    *byte = *byte & !(3 << shift) | state.bits() << shift;
                    1
                };
                let after = (*byte & 0b0101_0101).count_ones();
                self.data_blocks = self.data_blocks + u64::from(after) - u64::from(before);
                block += step;
            }
            piece.dirty = true;
            self.dirty = true;
        }
    }

    /// Whether anything was set since the last [`BlockMap::write_dirty`].
    pub(super) fn dirty(&self) -> bool {
        self.dirty
    }

    /// Hands every piece that changed to `write`, with its place in the map.
    pub(super) fn write_dirty<E>(
        &mut self,
        mut write: impl FnMut(u64, &[u8; PIECE]) -> Result<(), E>,
    ) -> Result<(), E> {
        for (index, piece) in (0..).zip(&mut self.pieces) {
            if let (true, Some(bytes)) = (piece.dirty, &piece.bytes) {
                write(index * PIECE as u64, bytes)?;
                piece.dirty = false;
            }
        }
        self.dirty = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_and_counts_agree_with_a_plain_list(
            blocks in 1u64..40_000,
            sets in proptest::collection::vec((0u64..40_000, 1u64..20_000, 0u8..3), 0..12),
        ) {
            let states = [BlockState::Absent, BlockState::Data, BlockState::Zero];
            let mut map = BlockMap::new(blocks);
            let mut plain = vec![BlockState::Absent; blocks as usize];
            for (first, count, state) in sets {
                let state = states[state as usize];
                let first = first % blocks;
                map.set(first, count, state);
                let end = (first + count).min(blocks) as usize;
                plain[first as usize..end].fill(state);
            }
            let data = plain.iter().filter(|s| **s == BlockState::Data).count() as u64;
            prop_assert_eq!(map.data_blocks(), data);
            prop_assert_eq!(map.count_data(0, blocks), data);
            let mut block = 0;
            while block < blocks {
                let (state, len) = map.run(block, blocks - block);
                prop_assert!(plain[block as usize..(block + len) as usize].iter().all(|s| *s == state));
                block += len;
                if block < blocks {
                    prop_assert_ne!(plain[block as usize], state);
                }
            }
            let mut copy = BlockMap::new(blocks);
            map.write_dirty(|at, bytes| copy.load(at as usize / PIECE, bytes)).unwrap();
            prop_assert_eq!(copy.data_blocks(), data);
        }
    }

    #[test]
    fn impossible_maps_are_refused() {
        let mut bytes = [0; PIECE];
        bytes[0] = 0b11;
        assert!(BlockMap::new(100).load(0, &bytes).is_err());
        bytes[0] = 0;
        bytes[25] = 1;
        assert!(BlockMap::new(100).load(0, &bytes).is_err());
        bytes[25] = 0;
        bytes[24] = 0b01_00_00_00;
        assert!(BlockMap::new(99).load(0, &bytes).is_err());
        assert!(BlockMap::new(100).load(0, &bytes).is_ok());
        assert!(BlockMap::new(100).load(1, &bytes).is_err());
    }
}
