//! Files with holes: digests, sizes, copies.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use forkd_types::{Digest, PAGE_SIZE};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

const PAGE: usize = PAGE_SIZE as usize;
/// Read at once.
const CHUNK: usize = 1 << 20;
/// What separates this digest from any other use of BLAKE3.
const DOMAIN: &[u8] = b"forkd pages 1\0";

/// How big a file is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Its length.
    pub logical: u64,
    /// What it takes on disk.
    pub physical: u64,
}

/// How big a file is.
pub fn sizes(file: &File) -> io::Result<Sizes> {
    let meta = file.metadata()?;
    Ok(Sizes {
        logical: meta.len(),
        physical: meta.blocks() * 512,
    })
}

/// The digest of a file's content as pages.
///
/// Each maximal run of pages that are not all zero goes in with the number of its first page and its
/// length, then the length of the file. Two files with the same bytes have the same digest wherever
/// their holes are, and a sparse file costs only what it holds.
pub fn page_digest(file: &File) -> io::Result<Digest> {
    let len = file.metadata()?.len();
    let mut hasher = Runs::new();
    let mut buffer = vec![0; CHUNK];
    for_data(file, len, |start, end| {
        let mut at = start;
        while at < end {
            let want = CHUNK.min(usize::try_from(end - at).unwrap_or(CHUNK));
            let chunk = buffer.get_mut(..want).unwrap_or_default();
            file.read_exact_at(chunk, at)?;
            for (number, page) in (at / PAGE_SIZE..).zip(chunk.chunks(PAGE)) {
                hasher.page(number, page);
            }
            at += want as u64;
        }
        Ok(())
    })?;
    Ok(hasher.finish(len))
}

/// Hashes pages as runs; pages between those given are zero.
struct Runs {
    hasher: blake3::Hasher,
    /// First page of the open run and the page after its last.
    open: Option<(u64, u64)>,
}

impl Runs {
    fn new() -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(DOMAIN);
        Self { hasher, open: None }
    }

    fn page(&mut self, number: u64, page: &[u8]) {
        if is_zero(page) {
            self.close();
            return;
        }
        match &mut self.open {
            Some((_, next)) if *next == number => *next += 1,
            _ => {
                self.close();
                self.hasher.update(&number.to_le_bytes());
                self.open = Some((number, number + 1));
            }
        }
        self.hasher.update(page);
    }

    fn close(&mut self) {
        if let Some((first, next)) = self.open.take() {
            self.hasher.update(&(next - first).to_le_bytes());
        }
    }

    fn finish(mut self, len: u64) -> Digest {
        self.close();
        self.hasher.update(&len.to_le_bytes());
        Digest(*self.hasher.finalize().as_bytes())
    }
}

fn is_zero(page: &[u8]) -> bool {
    static ZERO: [u8; PAGE] = [0; PAGE];
    ZERO.get(..page.len()) == Some(page)
}

/// Calls back for each part of the file that holds data, widened to whole pages.
fn for_data(file: &File, len: u64, each: impl FnMut(u64, u64) -> io::Result<()>) -> io::Result<()> {
    for_data_in(file, 0, len, each)
}

/// As [`for_data`] for what lies from `start`, at a page, to `len`.
fn for_data_in(
    file: &File,
    start: u64,
    len: u64,
    mut each: impl FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut at = start;
    while at < len {
        let data = match seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(()),
            // A file system without holes.
            Err(Errno::INVAL) => return each(at, len),
            Err(error) => return Err(error.into()),
        };
        let hole = seek(file, SeekFrom::Hole(data))?;
        let start = (data - data % PAGE_SIZE).max(at);
        let end = hole.next_multiple_of(PAGE_SIZE).min(len);
        if start < end {
            each(start, end)?;
        }
        at = end.max(at + 1);
    }
    Ok(())
}

/// Copies a file without filling its holes: shares the blocks where the file system can, else copies.
pub fn copy(from: &File, to: &File) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let len = from.metadata()?.len();
    to.set_len(len)?;
    copy_part(from, 0, to, 0, len)
}

/// Copies `len` bytes of pages between places at a page each, leaving out those that are zero: the target
/// has holes there.
pub fn copy_part(from: &File, start: u64, to: &File, target: u64, len: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    for_data_in(from, start, start + len, |first, end| {
        let mut at = first;
        while at < end {
            let want = CHUNK.min(usize::try_from(end - at).unwrap_or(CHUNK));
            let chunk = buffer.get_mut(..want).unwrap_or_default();
            from.read_exact_at(chunk, at)?;
            write_runs(chunk, to, target + (at - start))?;
            at += want as u64;
        }
        Ok(())
    })
}

/// Writes runs of pages that are not zero.
fn write_runs(chunk: &[u8], to: &File, offset: u64) -> io::Result<()> {
    let mut run = 0..0;
    for page in chunk.chunks(PAGE) {
        if is_zero(page) {
            to.write_all_at(
                chunk.get(run.clone()).unwrap_or_default(),
                offset + run.start as u64,
            )?;
            run = run.end + page.len()..run.end + page.len();
        } else {
            run.end += page.len();
        }
    }
    to.write_all_at(
        chunk.get(run.clone()).unwrap_or_default(),
        offset + run.start as u64,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Writes the pages and leaves the rest as holes.
    fn holey(pages: &[(u64, u8)], len: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        for &(number, fill) in pages {
            file.write_all_at(&[fill; PAGE], number * PAGE_SIZE)
                .unwrap();
        }
        file
    }

    /// The same content with every byte written.
    fn solid(pages: &[(u64, u8)], len: u64) -> File {
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
        fn holes_do_not_change_the_digest(pages in prop::collection::btree_map(0u64..600, 0u8..3, 0..20)) {
            let pages: Vec<_> = pages.into_iter().collect();
            let len = 600 * PAGE_SIZE;
            let one = page_digest(&holey(&pages, len)).unwrap();
            prop_assert_eq!(one, page_digest(&solid(&pages, len)).unwrap());
            let copied = tempfile::tempfile().unwrap();
            copy(&solid(&pages, len), &copied).unwrap();
            prop_assert_eq!(one, page_digest(&copied).unwrap());
        }
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

    #[test]
    fn place_length_and_content_count() {
        let base = page_digest(&holey(&[(3, 1)], 1 << 20)).unwrap();
        for other in [
            holey(&[(4, 1)], 1 << 20),
            holey(&[(3, 2)], 1 << 20),
            holey(&[(3, 1)], 2 << 20),
            holey(&[(3, 1), (4, 1)], 1 << 20),
            holey(&[], 1 << 20),
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
}
