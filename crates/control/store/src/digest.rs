//! The digest of a file's content, computed in parallel and, if asked for, while copying.
//!
//! ```text
//!   piece i   = BLAKE3("forkd piece 2\0", for each run: u64 first page, u64 bytes, the bytes)
//!   digest    = BLAKE3("forkd pages 2\0", for each piece that is not all zero: u64 i, its digest; u64 length of the file)
//! ```
//!
//! A piece is 1 MiB. A run is a maximal sequence of pages inside one piece that are not all zero. Two files with the
//! same bytes have the same digest wherever their holes are, and a sparse file costs what it holds. Pieces do not
//! depend on each other, so that several threads share the work.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use forkd_os::sparse::DataRanges;
use forkd_types::{Digest, PAGE_SIZE};

use crate::sparse::runs;

const ROOT: &[u8] = b"forkd pages 2\0";
const PIECE: &[u8] = b"forkd piece 2\0";
const PIECE_LEN: u64 = 1 << 20;
/// More threads than this wait for memory, not for a processor.
const MAX_THREADS: usize = 8;
/// Fewer pieces per thread than this do not pay for starting it.
const PIECES_PER_THREAD: usize = 4;

/// The digest of a file's content.
pub fn page_digest(file: &File) -> io::Result<Digest> {
    let len = file.metadata()?.len();
    digest(file, None, len)
}

/// Copies a file into the empty file `to`, leaving holes where pages are zero, and gives the digest of the copy.
///
/// Every byte is read once, and the bytes that were hashed are the bytes that are written: the digest is that of the
/// copy, even if another process changes the source meanwhile.
pub fn copy_with_digest(from: &File, to: &File) -> io::Result<Digest> {
    let len = from.metadata()?.len();
    to.set_len(len)?;
    digest(from, Some(to), len)
}

fn digest(from: &File, to: Option<&File>, len: u64) -> io::Result<Digest> {
    let pieces = pieces_with_data(from, len)?;
    let found = in_parallel(&pieces, |at, buffer| {
        let range = at * PIECE_LEN..((at + 1) * PIECE_LEN).min(len);
        one_piece(from, to, range, buffer)
    })?;
    let mut root = blake3::Hasher::new();
    root.update(ROOT);
    for (at, piece) in pieces.iter().zip(found) {
        if let Some(piece) = piece {
            root.update(&at.to_le_bytes());
            root.update(piece.as_bytes());
        }
    }
    root.update(&len.to_le_bytes());
    Ok(Digest(*root.finalize().as_bytes()))
}

/// Numbers of the pieces that are not one hole.
fn pieces_with_data(file: &File, len: u64) -> io::Result<Vec<u64>> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while let Some(data) = DataRanges::new(file, at..len).next() {
        let data = data?;
        let last = (data.end - 1) / PIECE_LEN;
        pieces.extend(data.start / PIECE_LEN..=last);
        at = (last + 1) * PIECE_LEN;
    }
    Ok(pieces)
}

/// Hashes one piece and copies it; `None` if it is all zero.
fn one_piece(
    from: &File,
    to: Option<&File>,
    range: Range<u64>,
    buffer: &mut [u8],
) -> io::Result<Option<blake3::Hash>> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(PIECE);
    let mut any = false;
    for data in DataRanges::new(from, range) {
        let data = data?;
        let len = usize::try_from(data.end - data.start).unwrap_or(0);
        let chunk = buffer.get_mut(..len).unwrap_or_default();
        from.read_exact_at(chunk, data.start)?;
        for run in runs(chunk) {
            let offset = data.start + run.start as u64;
            let bytes = chunk.get(run).unwrap_or_default();
            hasher.update(&(offset / PAGE_SIZE).to_le_bytes());
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
            if let Some(to) = to {
                to.write_all_at(bytes, offset)?;
            }
            any = true;
        }
    }
    Ok(any.then(|| hasher.finalize()))
}

/// Applies `work` to every piece, each thread with a buffer of its own, and keeps the order of the results.
fn in_parallel<T: Send>(
    pieces: &[u64],
    work: impl Fn(u64, &mut [u8]) -> io::Result<T> + Sync,
) -> io::Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let share = || -> io::Result<Vec<(usize, T)>> {
        let mut buffer = vec![0; PIECE_LEN as usize];
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(at) else {
                return Ok(done);
            };
            done.push((at, work(*piece, &mut buffer)?));
        }
    };
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(MAX_THREADS)
        .min(pieces.len() / PIECES_PER_THREAD);
    let mut all = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(share)).collect();
        let mut all = share()?;
        for other in others {
            let done = other
                .join()
                .map_err(|_| io::Error::other("a hashing thread panicked"))?;
            all.extend(done?);
        }
        io::Result::Ok(all)
    })?;
    all.sort_unstable_by_key(|(at, _)| *at);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sparse::tests::{holey, solid};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn holes_do_not_change_the_digest(pages in prop::collection::btree_map(0u64..3000, 0u8..3, 0..40)) {
            let pages: Vec<_> = pages.into_iter().collect();
            let len = 3000 * PAGE_SIZE;
            let one = page_digest(&holey(&pages, len)).unwrap();
            prop_assert_eq!(one, page_digest(&solid(&pages, len)).unwrap());
            let copied = tempfile::tempfile().unwrap();
            prop_assert_eq!(one, copy_with_digest(&solid(&pages, len), &copied).unwrap());
            prop_assert_eq!(one, page_digest(&copied).unwrap());
        }
    }

    #[test]
    fn place_length_and_content_count() {
        let base = page_digest(&holey(&[(3, 1)], 4 << 20)).unwrap();
        for other in [
            holey(&[(4, 1)], 4 << 20),
            holey(&[(3 + 256, 1)], 4 << 20),
            holey(&[(3, 2)], 4 << 20),
            holey(&[(3, 1)], 5 << 20),
            holey(&[(3, 1), (4, 1)], 4 << 20),
            holey(&[(3, 1), (259, 1)], 4 << 20),
            holey(&[], 4 << 20),
        ] {
            assert_ne!(base, page_digest(&other).unwrap());
        }
    }

    #[test]
    fn a_last_page_may_be_short() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"hello", 0).unwrap();
        let one = page_digest(&file).unwrap();
        file.write_all_at(b"hellp", 0).unwrap();
        assert_ne!(one, page_digest(&file).unwrap());
    }

    #[test]
    fn a_failure_in_any_piece_is_a_failure() {
        let from = holey(&[(0, 1), (700, 1), (1300, 1), (2000, 1)], 9 << 20);
        let read_only = tempfile::NamedTempFile::new().unwrap();
        let read_only = File::open(read_only.path()).unwrap();
        assert!(digest(&from, Some(&read_only), 9 << 20).is_err());
    }
}
