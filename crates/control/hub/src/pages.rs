//! Pages of files: reading those that are not zero, and hashing them.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use forkd_os::sparse::DataRanges;

use crate::limits::PAGE;

/// Bytes per read.
const CHUNK: usize = 1 << 20;

/// The hash of a page.
pub type PageHash = [u8; 32];

static ZERO: [u8; PAGE] = [0; PAGE];

/// The hash of one whole page.
pub fn hash(page: &[u8]) -> PageHash {
    *blake3::hash(page).as_bytes()
}

/// Reads every chunk of a file that holds data. Chunks start at a page; the end of the last page is filled with zeros.
pub fn each_chunk<E: From<io::Error>>(
    file: &File,
    mut visit: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let len = file.metadata()?.len();
    let mut buffer = vec![0; CHUNK];
    for range in DataRanges::new(file, 0..len) {
        let range = range?;
        let mut at = range.start;
        while at < range.end {
            let want = CHUNK.min(usize::try_from(range.end - at).unwrap_or(CHUNK));
            let whole = want.next_multiple_of(PAGE);
            buffer.truncate(0);
            buffer.resize(whole, 0);
            file.read_exact_at(buffer.get_mut(..want).unwrap_or_default(), at)?;
            visit(at / PAGE as u64, &buffer)?;
            at += want as u64;
        }
    }
    Ok(())
}

/// Reads one page. Bytes behind the end of the file are zero.
pub fn read_page(file: &File, page: u64, buffer: &mut [u8; PAGE]) -> io::Result<()> {
    let mut done = 0;
    while done < PAGE {
        let rest = buffer.get_mut(done..).unwrap_or_default();
        match file.read_at(rest, page * PAGE as u64 + done as u64)? {
            0 => break,
            read => done += read,
        }
    }
    buffer.get_mut(done..).unwrap_or_default().fill(0);
    Ok(())
}

/// The pages of a chunk that are not zero, with their numbers.
pub fn used_pages(first: u64, chunk: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    chunk
        .chunks(PAGE)
        .enumerate()
        .map(move |(at, page)| (first + at as u64, page))
        .filter(|(_, page)| ZERO.get(..page.len()) != Some(*page))
}
