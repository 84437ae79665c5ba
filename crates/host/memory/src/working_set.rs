//! The working set: pages that the first child of a snapshot touches until it is ready.
//!
//! Later children bring these pages in before they run. The file is untrusted, and bounded in size.
//!
//! ```text
//!   8  magic "FORKDWS1"    4  pages of memory    4  number of ranges
//!   8  a range: first page, count with the top bit set if it was written     (repeated)
//!   4  CRC-32 of all that comes before
//! ```

use forkd_sys::{PageRange, Pagemap};
use thiserror::Error;

use crate::{GuestRam, MemoryError, PageSet};

const MAGIC: &[u8; 8] = b"FORKDWS1";
const WRITTEN: u32 = 1 << 31;
const HEADER: usize = 16;
/// The most ranges a file may have.
const MAX_RANGES: usize = 64 * 1024;
/// The most pages of a set, recorded or read: a guest that touches everything does not make its siblings
/// do so.
const MAX_PAGES: u64 = 8192;

/// The pages that were read and those that were written, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkingSet {
    pages: u32,
    ranges: Vec<(PageRange, bool)>,
}

/// Why bytes are not a working set.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WorkingSetError {
    /// The magic is wrong or the file is truncated.
    #[error("not a working-set file")]
    Format,
    /// The checksum does not fit.
    #[error("the working-set file is damaged")]
    Checksum,
    /// The working set is of a VM of another size.
    #[error("the working set is for {found} pages, the VM has {expected}")]
    Size { found: u32, expected: u32 },
    /// The working set has more pages than are ever recorded.
    #[error("the working set has more than {MAX_PAGES} pages")]
    TooLarge,
    /// A range is empty, out of order or out of bounds.
    #[error("range {number} of the working set is out of bounds")]
    Range { number: usize },
}

impl WorkingSet {
    /// The pages of `ram` touched since it was mapped. The kernel maps neighbours of a page that is read, too, unless
    /// writes to the memory are followed.
    pub fn record(ram: &GuestRam, pagemap: &Pagemap) -> Result<Self, MemoryError> {
        let touched = ram.touched_pages(pagemap)?;
        let written = ram.private_pages(pagemap)?;
        let mut ranges = split(&touched, &written);
        ranges.truncate(within(MAX_PAGES, &ranges).min(MAX_RANGES));
        Ok(Self {
            pages: ram.layout().pages(),
            ranges,
        })
    }

    /// Copies the pages into `ram` that were written.
    pub fn populate_written(&self, ram: &GuestRam) -> Result<(), MemoryError> {
        self.populate(ram, true)
    }

    /// Makes the pages present in `ram` that were only read.
    pub fn populate_read(&self, ram: &GuestRam) -> Result<(), MemoryError> {
        self.populate(ram, false)
    }

    fn populate(&self, ram: &GuestRam, written: bool) -> Result<(), MemoryError> {
        let wanted = self.ranges.iter().filter(|(_, was)| *was == written);
        wanted
            .into_iter()
            .try_for_each(|(range, _)| ram.populate(*range, written))
    }

    /// All pages, read or written.
    pub fn pages(&self) -> PageSet {
        PageSet::new(self.ranges.iter().map(|(range, _)| *range).collect())
    }

    /// The ranges, each with whether it was written.
    pub fn ranges(&self) -> &[(PageRange, bool)] {
        &self.ranges
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&self.pages.to_le_bytes());
        bytes.extend_from_slice(&(self.ranges.len() as u32).to_le_bytes());
        for &(range, write) in &self.ranges {
            let count = range.count as u32 | if write { WRITTEN } else { 0 };
            bytes.extend_from_slice(&(range.first as u32).to_le_bytes());
            bytes.extend_from_slice(&count.to_le_bytes());
        }
        let sum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// From bytes that may be anything, for a VM of `pages` pages.
    pub fn decode(bytes: &[u8], pages: u32) -> Result<Self, WorkingSetError> {
        let number = |at: usize| {
            bytes
                .get(at..at + 4)
                .and_then(|b| b.try_into().ok())
                .map(u32::from_le_bytes)
                .ok_or(WorkingSetError::Format)
        };
        if bytes.get(..8) != Some(MAGIC) {
            return Err(WorkingSetError::Format);
        }
        let (found, count) = (number(8)?, number(12)? as usize);
        if count > MAX_RANGES || bytes.len() != HEADER + count * 8 + 4 {
            return Err(WorkingSetError::Format);
        }
        let body = HEADER + count * 8;
        if number(body)? != crc32fast::hash(&bytes[..body]) {
            return Err(WorkingSetError::Checksum);
        }
        if found != pages {
            return Err(WorkingSetError::Size {
                found,
                expected: pages,
            });
        }
        let mut ranges = Vec::with_capacity(count);
        let (mut after, mut total) = (0, 0);
        for n in 0..count {
            let (first, count) = (number(HEADER + n * 8)?, number(HEADER + n * 8 + 4)?);
            let range = PageRange {
                first: u64::from(first),
                count: u64::from(count & !WRITTEN),
            };
            if range.count == 0 || range.first < after || range.end() > u64::from(pages) {
                return Err(WorkingSetError::Range { number: n });
            }
            after = range.end();
            total += range.count;
            ranges.push((range, count & WRITTEN != 0));
        }
        if total > MAX_PAGES {
            return Err(WorkingSetError::TooLarge);
        }
        Ok(Self { pages, ranges })
    }

    /// The largest encoding a valid set can have.
    pub const fn max_encoded_len() -> usize {
        HEADER + MAX_RANGES * 8 + 4
    }
}

/// How many ranges from the first on have at most `limit` pages together.
fn within(limit: u64, ranges: &[(PageRange, bool)]) -> usize {
    let mut pages = 0;
    ranges
        .iter()
        .take_while(|(range, _)| {
            pages += range.count;
            pages <= limit
        })
        .count()
}

/// Cuts `touched` at the borders of `written`.
fn split(touched: &[PageRange], written: &[PageRange]) -> Vec<(PageRange, bool)> {
    let mut out: Vec<(PageRange, bool)> = Vec::new();
    let mut marks: Vec<(u64, i8, i8)> = Vec::with_capacity(2 * (touched.len() + written.len()));
    for r in touched {
        marks.extend([(r.first, 1, 0), (r.end(), -1, 0)]);
    }
    for r in written {
        marks.extend([(r.first, 0, 1), (r.end(), 0, -1)]);
    }
    marks.sort_unstable();
    let (mut at, mut touch, mut write) = (0, 0i32, 0i32);
    for (page, t, w) in marks {
        if page > at && (touch > 0 || write > 0) {
            let next = PageRange {
                first: at,
                count: page - at,
            };
            match out.last_mut() {
                Some((last, was)) if last.end() == at && *was == (write > 0) => {
                    last.count += next.count;
                }
                _ => out.push((next, write > 0)),
            }
        }
        at = page;
        touch += i32::from(t);
        write += i32::from(w);
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(first: u64, count: u64) -> PageRange {
        PageRange { first, count }
    }

    #[test]
    fn a_set_has_an_end() {
        let ranges = [
            (range(0, 3), false),
            (range(4, 2), true),
            (range(9, 1), true),
        ];
        assert_eq!(
            [2, 3, 5, 6].map(|limit| within(limit, &ranges)),
            [0, 1, 2, 3]
        );
    }

    #[test]
    fn written_pages_are_cut_out_of_touched_ones() {
        assert_eq!(
            split(&[range(0, 10), range(20, 1)], &[range(3, 2), range(20, 1)]),
            [
                (range(0, 3), false),
                (range(3, 2), true),
                (range(5, 5), false),
                (range(20, 1), true),
            ]
        );
    }

    #[test]
    fn a_set_survives_its_encoding_and_a_flipped_byte_does_not() {
        let set = WorkingSet {
            pages: 100,
            ranges: vec![(range(1, 2), true), (range(9, 1), false)],
        };
        let bytes = set.encode();
        assert_eq!(WorkingSet::decode(&bytes, 100).unwrap(), set);
        assert!(WorkingSet::decode(&bytes, 99).is_err());
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(WorkingSet::decode(&bad, 100).is_err(), "byte {at}");
        }
    }

    /// A forged file cannot make each child of a snapshot copy all of its memory.
    #[test]
    fn more_pages_than_are_recorded_are_refused() {
        let pages = 1 << 20;
        let set = |count| WorkingSet {
            pages,
            ranges: vec![(range(0, 1), false), (range(1, count), true)],
        };
        let most = set(MAX_PAGES - 1);
        assert_eq!(WorkingSet::decode(&most.encode(), pages), Ok(most));
        assert_eq!(
            WorkingSet::decode(&set(MAX_PAGES).encode(), pages),
            Err(WorkingSetError::TooLarge)
        );
    }

    proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            let _ = WorkingSet::decode(&bytes, 64);
            let mut with_magic = MAGIC.to_vec();
            with_magic.extend(bytes);
            let _ = WorkingSet::decode(&with_magic, 64);
        }
    }
}
