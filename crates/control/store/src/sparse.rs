//! Sizes of files with holes, and copies of parts of them.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use forkd_os::sparse::DataRanges;
use forkd_types::PAGE_SIZE;

const PAGE: usize = PAGE_SIZE as usize;
/// Bytes per read.
const CHUNK: usize = 1 << 20;

/// Size of a file with holes, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Length of the file.
    pub logical: u64,
    /// Space on the file system.
    pub physical: u64,
}

impl From<Metadata> for Sizes {
    fn from(meta: Metadata) -> Self {
        Self {
            logical: meta.len(),
            physical: meta.blocks() * 512,
        }
    }
}

/// Size of an open file.
pub fn sizes(file: &File) -> io::Result<Sizes> {
    file.metadata().map(Sizes::from)
}

/// Copies `len` bytes from `start` to `target`, both at a page. Pages that are zero are not written: the target, a new
/// file, has holes there.
pub fn copy_part(from: &File, start: u64, to: &File, target: u64, len: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    for data in DataRanges::new(from, start..start + len) {
        let data = data?;
        let mut at = data.start;
        while at < data.end {
            let want = CHUNK.min(usize::try_from(data.end - at).unwrap_or(CHUNK));
            let chunk = buffer.get_mut(..want).unwrap_or_default();
            from.read_exact_at(chunk, at)?;
            for run in runs(chunk) {
                let offset = target + (at - start) + run.start as u64;
                to.write_all_at(chunk.get(run).unwrap_or_default(), offset)?;
            }
            at += want as u64;
        }
    }
    Ok(())
}

/// The maximal runs of pages in a chunk that are not all zero, as byte ranges. The last page may be short.
pub(crate) fn runs(chunk: &[u8]) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let page_at = |at: usize| {
            chunk
                .get(at..chunk.len().min(at + PAGE))
                .unwrap_or_default()
        };
        while at < chunk.len() && is_zero(page_at(at)) {
            at += PAGE;
        }
        let start = at;
        while at < chunk.len() && !is_zero(page_at(at)) {
            at += PAGE;
        }
        (start < chunk.len()).then(|| start..at.min(chunk.len()))
    })
}

fn is_zero(page: &[u8]) -> bool {
    static ZERO: [u8; PAGE] = [0; PAGE];
    ZERO.get(..page.len()) == Some(page)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::page_digest;

    /// Writes the pages and leaves the rest as holes.
    pub fn holey(pages: &[(u64, u8)], len: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        for &(number, fill) in pages {
            file.write_all_at(&[fill; PAGE], number * PAGE_SIZE)
                .unwrap();
        }
        file
    }

    /// The same content with every byte written.
    pub fn solid(pages: &[(u64, u8)], len: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        let mut bytes = vec![0; len as usize];
        for &(number, fill) in pages {
            let at = (number * PAGE_SIZE) as usize;
            bytes[at..at + PAGE].fill(fill);
        }
        file.write_all_at(&bytes, 0).unwrap();
        file
    }

    proptest! {
        #[test]
        fn a_part_is_copied_to_its_place(pages in prop::collection::btree_map(0u64..300, 0u8..3, 0..30), from in 0u64..300, count in 1u64..300) {
            let pages: Vec<_> = pages.into_iter().collect();
            let count = count.min(300 - from);
            let source = holey(&pages, 300 * PAGE_SIZE);
            let out = tempfile::tempfile().unwrap();
            out.set_len(400 * PAGE_SIZE).unwrap();
            copy_part(&source, from * PAGE_SIZE, &out, 50 * PAGE_SIZE, count * PAGE_SIZE).unwrap();
            let moved: Vec<_> = pages
                .into_iter()
                .filter(|(page, _)| (from..from + count).contains(page))
                .map(|(page, fill)| (page - from + 50, fill))
                .collect();
            let want = page_digest(&holey(&moved, 400 * PAGE_SIZE)).unwrap();
            prop_assert_eq!(want, page_digest(&out).unwrap());
        }
    }
}
