//! Merging disk layers: many thin ones become one that reads the same on the same base.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use forkd_formats::layer::{
    BLOCK, BLOCKS_PER_MAP_BYTE, HEADER_LEN, LayerError, LayerHeader, check_map,
};
use thiserror::Error;

use crate::sparse::copy_part;

/// Bytes of a map that are merged at once; they cover 64 MiB of disk.
const PIECE: usize = 4096;

/// Why layers were not merged.
#[derive(Debug, Error)]
pub enum MergeError {
    /// There is nothing to merge.
    #[error("there are no layers")]
    None,
    /// A file is not a layer.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// They belong to different disks.
    #[error("a layer of {found} bytes lies on one of {size}")]
    Size {
        /// Of the layer.
        found: u64,
        /// Of the first.
        size: u64,
    },
    /// A file cannot be read or written.
    #[error("cannot read or write a layer")]
    Io(#[from] io::Error),
}

/// Merges `layers`, the oldest first, into the new file `out`. The newest layer that holds a block wins.
pub fn merge_layers(layers: &[File], out: &File) -> Result<(), MergeError> {
    let headers = layers
        .iter()
        .map(read_header)
        .collect::<Result<Vec<_>, _>>()?;
    let size = headers.first().ok_or(MergeError::None)?.size;
    if let Some(other) = headers.iter().find(|header| header.size != size) {
        let found = other.size;
        return Err(MergeError::Size { found, size });
    }
    let header = LayerHeader::new(size, 0)?;
    out.write_all_at(&header.encode(), 0)?;
    out.set_len(header.file_len())?;
    let mut map = [0; PIECE];
    for at in (0..header.map_len()).step_by(PIECE) {
        merge_piece(header, layers, at, &mut map, out)?;
        if map.iter().any(|byte| *byte != 0) {
            out.write_all_at(&map, header.map_offset() + at)?;
        }
    }
    Ok(())
}

fn read_header(layer: &File) -> Result<LayerHeader, MergeError> {
    let mut page = [0; HEADER_LEN];
    layer.read_exact_at(&mut page, 0)?;
    let header = LayerHeader::decode(&page)?;
    if layer.metadata()?.len() != header.file_len() {
        return Err(LayerError::Damaged("its length is not what its header says").into());
    }
    Ok(header)
}

/// Merges the part of the maps that begins at byte `at` into `map`, and copies the blocks it speaks of.
fn merge_piece(
    header: LayerHeader,
    layers: &[File],
    at: u64,
    map: &mut [u8; PIECE],
    out: &File,
) -> Result<(), MergeError> {
    let first = at * BLOCKS_PER_MAP_BYTE;
    map.fill(0);
    let mut theirs = [0; PIECE];
    // From the top: what a layer knows hides what is below.
    for layer in layers.iter().rev() {
        layer.read_exact_at(&mut theirs, header.map_offset() + at)?;
        check_map(&theirs, first, header.blocks())?;
        let mut run = 0..0;
        for (byte, (ours, theirs)) in (0..).zip(map.iter_mut().zip(&theirs)) {
            let absent = !(*ours | *ours >> 1) & 0b0101_0101;
            let new = theirs & (absent * 3);
            *ours |= new;
            for place in 0..BLOCKS_PER_MAP_BYTE {
                if new >> (2 * place) & 1 == 1 {
                    let block = first + byte * BLOCKS_PER_MAP_BYTE + place;
                    if run.end != block {
                        copy_blocks(header, layer, &run, out)?;
                        run = block..block;
                    }
                    run.end = block + 1;
                }
            }
        }
        copy_blocks(header, layer, &run, out)?;
    }
    Ok(())
}

/// Copies blocks, which are at the same place in every layer of a disk.
fn copy_blocks(
    header: LayerHeader,
    from: &File,
    blocks: &std::ops::Range<u64>,
    to: &File,
) -> io::Result<()> {
    let start = header.data_offset() + blocks.start * BLOCK;
    let len = (blocks.end - blocks.start) * BLOCK;
    copy_part(from, start, to, start, len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCKS: u64 = 20_003;
    const SIZE: u64 = BLOCKS * BLOCK - 1024;

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Known {
        Data(u8),
        Zero,
    }

    fn layer(blocks: &[(u64, Known)]) -> File {
        let header = LayerHeader::new(SIZE, 7).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&header.encode(), 0).unwrap();
        file.set_len(header.file_len()).unwrap();
        for &(number, block) in blocks {
            let bits = match block {
                Known::Data(fill) => {
                    let at = header.data_offset() + number * BLOCK;
                    file.write_all_at(&[fill; BLOCK as usize], at).unwrap();
                    1
                }
                Known::Zero => 2,
            };
            let at = header.map_offset() + number / 4;
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            let shift = number % 4 * 2;
            byte[0] = byte[0] & !(3 << shift) | bits << shift;
            file.write_all_at(&byte, at).unwrap();
        }
        file
    }

    fn look(file: &File, number: u64) -> Option<Known> {
        let header = read_header(file).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, header.map_offset() + number / 4)
            .unwrap();
        match byte[0] >> (number % 4 * 2) & 3 {
            0 => None,
            1 => {
                let mut data = [0; BLOCK as usize];
                file.read_exact_at(&mut data, header.data_offset() + number * BLOCK)
                    .unwrap();
                assert!(data.iter().all(|byte| *byte == data[0]));
                Some(Known::Data(data[0]))
            }
            _ => Some(Known::Zero),
        }
    }

    /// Close together and far apart, at both ends.
    fn block() -> impl Strategy<Value = (u64, Known)> {
        let number = prop_oneof![0..12u64, 16_380..16_390u64, BLOCKS - 5..BLOCKS];
        let what = prop_oneof![any::<u8>().prop_map(Known::Data), Just(Known::Zero)];
        (number, what)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn the_top_most_layer_that_knows_a_block_wins(
            stack in proptest::collection::vec(proptest::collection::vec(block(), 0..20), 1..6)
        ) {
            let files: Vec<File> = stack.iter().map(|blocks| layer(blocks)).collect();
            let out = tempfile::tempfile().unwrap();
            merge_layers(&files, &out).unwrap();
            let touched = (0..20).chain(16_370..16_400).chain(BLOCKS - 10..BLOCKS);
            for number in touched {
                let expected = files.iter().rev().find_map(|file| look(file, number));
                prop_assert_eq!(look(&out, number), expected, "block {}", number);
            }
        }
    }

    #[test]
    fn what_is_no_layer_of_the_disk_is_refused() {
        let out = || tempfile::tempfile().unwrap();
        assert!(matches!(merge_layers(&[], &out()), Err(MergeError::None)));
        let zeroes = tempfile::tempfile().unwrap();
        zeroes.set_len(1 << 20).unwrap();
        assert!(matches!(
            merge_layers(&[zeroes], &out()),
            Err(MergeError::Layer(_))
        ));
        let broken = layer(&[]);
        broken.write_all_at(&[0b11], 4096).unwrap();
        assert!(matches!(
            merge_layers(&[layer(&[]), broken], &out()),
            Err(MergeError::Layer(_))
        ));
        let other = tempfile::tempfile().unwrap();
        let header = LayerHeader::new(SIZE + 512, 0).unwrap();
        other.write_all_at(&header.encode(), 0).unwrap();
        other.set_len(header.file_len()).unwrap();
        assert!(matches!(
            merge_layers(&[layer(&[]), other], &out()),
            Err(MergeError::Size { .. })
        ));
    }
}
