//! Files with holes: walking their data and copying them without filling the holes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek};
use rustix::io::Errno;

/// The granularity of [`DataRanges`].
pub const PAGE: u64 = 4096;
/// Bytes per read where the kernel cannot copy by itself.
const CHUNK: usize = 1 << 20;

/// The parts of a file that hold data, in order.
///
/// Each range is widened to whole pages and cut at the end of the walk. Ranges do not touch: two neighbours have at
/// least one page of hole between them. A file system that cannot tell holes from data gives one range.
#[derive(Debug)]
pub struct DataRanges<'f> {
    file: BorrowedFd<'f>,
    at: u64,
    end: u64,
    /// The next data at or after `at`, if a lookahead has found it already.
    found: Option<u64>,
}

impl<'f> DataRanges<'f> {
    /// Walks the part `range` of a file. `range.start` is a multiple of [`PAGE`].
    pub fn new(file: &'f impl AsFd, range: Range<u64>) -> Self {
        Self {
            file: file.as_fd(),
            at: range.start,
            end: range.end,
            found: None,
        }
    }

    /// Offset of the first data at or after `from`; `None` if only a hole is left.
    fn data_from(&mut self, from: u64) -> io::Result<Option<u64>> {
        if let Some(found) = self.found.take() {
            return Ok(Some(found));
        }
        match seek(self.file, SeekFrom::Data(from)) {
            Ok(data) => Ok(Some(data).filter(|data| *data < self.end)),
            Err(Errno::NXIO) => Ok(None),
            // The file system does not know about holes.
            Err(Errno::INVAL) => Ok(Some(from)),
            Err(error) => Err(error.into()),
        }
    }

    /// End of the data that begins at `data`, as whole pages.
    fn end_of(&self, data: u64) -> io::Result<u64> {
        let hole = match seek(self.file, SeekFrom::Hole(data)) {
            Ok(hole) => hole,
            Err(Errno::INVAL) => self.end,
            Err(error) => return Err(error.into()),
        };
        // The file may shrink during the walk; the walk still advances.
        let hole = hole.max(data + 1);
        Ok(hole.next_multiple_of(PAGE).min(self.end))
    }

    fn advance(&mut self) -> io::Result<Option<Range<u64>>> {
        if self.at >= self.end {
            return Ok(None);
        }
        let Some(data) = self.data_from(self.at)? else {
            self.at = self.end;
            return Ok(None);
        };
        let start = (data - data % PAGE).max(self.at);
        let mut stop = self.end_of(data)?;
        while stop < self.end {
            let Some(next) = self.data_from(stop)? else {
                self.at = self.end;
                return Ok(Some(start..stop));
            };
            if next - next % PAGE > stop {
                self.found = Some(next);
                break;
            }
            stop = self.end_of(next)?;
        }
        self.at = stop;
        Ok(Some(start..stop))
    }
}

impl Iterator for DataRanges<'_> {
    type Item = io::Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.advance().transpose();
        if matches!(next, Some(Err(_))) {
            self.at = self.end;
        }
        next
    }
}

/// Makes `to`, a new empty file, a copy of `from`. Shares blocks where the file system can; otherwise copies the data
/// inside the kernel and leaves holes as holes.
pub fn copy(from: &File, to: &File) -> io::Result<()> {
    if ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    let len = from.metadata()?.len();
    to.set_len(len)?;
    for range in DataRanges::new(from, 0..len) {
        copy_range(from, to, range?)?;
    }
    Ok(())
}

/// Copies one range to the same place of another file.
fn copy_range(from: &File, to: &File, range: Range<u64>) -> io::Result<()> {
    let (mut source, mut target) = (range.start, range.start);
    while source < range.end {
        let left = usize::try_from(range.end - source).unwrap_or(usize::MAX);
        match copy_file_range(from, Some(&mut source), to, Some(&mut target), left) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(Errno::INTR) => {}
            // Two file systems, or one that has no such operation.
            Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                return copy_by_reading(from, to, source..range.end);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn copy_by_reading(from: &File, to: &File, range: Range<u64>) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let mut at = range.start;
    while at < range.end {
        let want = CHUNK.min(usize::try_from(range.end - at).unwrap_or(CHUNK));
        let chunk = buffer.get_mut(..want).unwrap_or_default();
        from.read_exact_at(chunk, at)?;
        to.write_all_at(chunk, at)?;
        at += want as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::*;

    fn holey(pages: &BTreeSet<u64>, len: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        for page in pages {
            file.write_all_at(&[1; PAGE as usize], page * PAGE).unwrap();
        }
        file
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn ranges_cover_all_data_and_never_touch(
            pages in prop::collection::btree_set(0u64..300, 0..40),
            start in 0u64..300,
            count in 1u64..300,
        ) {
            let end = (start + count).min(300);
            let file = holey(&pages, 300 * PAGE);
            let found: Vec<_> = DataRanges::new(&file, start * PAGE..end * PAGE)
                .collect::<io::Result<_>>()
                .unwrap();
            for pair in found.windows(2) {
                prop_assert!(pair[0].end < pair[1].start);
            }
            for page in pages.iter().filter(|page| (start..end).contains(page)) {
                prop_assert!(found.iter().any(|range| range.contains(&(page * PAGE))));
            }
            for range in &found {
                prop_assert!(start * PAGE <= range.start && range.end <= end * PAGE);
            }
        }
    }

    #[test]
    fn a_copy_has_the_same_bytes_and_its_holes() {
        let from = holey(&BTreeSet::from([0, 5, 4000]), 5000 * PAGE + 17);
        from.write_all_at(b"end", 5000 * PAGE).unwrap();
        let to = tempfile::tempfile().unwrap();
        copy(&from, &to).unwrap();
        let len = from.metadata().unwrap().len();
        let read = |file: &File| {
            let mut bytes = vec![0; len as usize];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        assert_eq!(to.metadata().unwrap().len(), len);
        assert!(read(&from) == read(&to));
        assert!(to.metadata().unwrap().blocks() * 512 < len / 4);
    }
}
