//! Copying pages to a file before the machine stops.
//!
//! [`EarlyCopy`] is filled while the guest runs, from pages that were marked before: a page that is written after its
//! mark shows up as touched, and is copied again when the machine stands still. So a copy that was torn by a write is
//! never part of the cut.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;

use forkd_sys::PageRange;

use crate::writer::is_zero;
use crate::{GuestRam, PAGE_SIZE, PageSet, WriteReport};

/// Pages that are copied at once. The copy fits into the caches of a processor.
const AT_ONCE: u64 = 64;

/// The pages that a file has already.
#[derive(Debug, Default)]
pub struct EarlyCopy {
    copied: PageSet,
    /// Pages that were written since they were copied, and marked again.
    outdated: PageSet,
    /// Pages that were not zero when they were copied.
    written: u64,
    zero: u64,
}

impl EarlyCopy {
    /// Copies pages to the file, page N at offset N pages. A zero page is left out if the file does not have it yet.
    ///
    /// The guest may run: see the module for what has to be done with pages that it writes.
    pub fn copy(
        &mut self,
        ram: &GuestRam,
        file: BorrowedFd<'_>,
        pages: &PageSet,
    ) -> io::Result<()> {
        let (again, new) = pages.split(&self.copied);
        for range in again.ranges() {
            copy_range(ram, file, *range, false)?;
        }
        for range in new.ranges() {
            let zero = copy_range(ram, file, *range, true)?;
            self.zero += zero;
            self.written += range.count - zero;
        }
        self.copied.add(&new);
        self.outdated = self.outdated.split(pages).1;
        Ok(())
    }

    /// Notes pages that were marked again after the guest had written them. They count as changed until they are copied.
    pub fn outdate(&mut self, pages: &PageSet) {
        self.outdated.add(pages);
    }

    /// The pages that were copied.
    pub fn pages(&self) -> &PageSet {
        &self.copied
    }

    /// The pages of `wanted` that have to be copied while the machine stands still: those that were not copied, and
    /// those that changed since.
    pub fn missing(&self, wanted: &PageSet, changed: &PageSet) -> PageSet {
        let (_, unchanged) = self.copied.split(changed);
        let (_, valid) = unchanged.split(&self.outdated);
        wanted.split(&valid).1
    }

    /// The report of a cut whose pages have all been copied.
    pub fn report(&self, ranges: Vec<PageRange>) -> WriteReport {
        WriteReport {
            written: self.written,
            zero: self.zero,
            ranges,
        }
    }
}

/// Copies a run of pages; returns how many zero pages were left out.
fn copy_range(
    ram: &GuestRam,
    file: BorrowedFd<'_>,
    range: PageRange,
    skip_zero: bool,
) -> io::Result<u64> {
    if range.end() > u64::from(ram.layout().pages()) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut buffer = vec![0u8; (AT_ONCE.min(range.count) * PAGE_SIZE) as usize];
    let mut zeroes = 0;
    let mut first = range.first;
    while first < range.end() {
        let count = AT_ONCE.min(range.end() - first);
        let Some(piece) = buffer.get_mut(..(count * PAGE_SIZE) as usize) else {
            break;
        };
        // SAFETY: the pages lie inside guest RAM, checked above, which stays mapped. The guest may write them at the
        // same time, so the copy may be torn; it is bytes, and every value of them is valid.
        unsafe {
            let from = ram.base().as_ptr().add((first * PAGE_SIZE) as usize);
            std::ptr::copy_nonoverlapping(from, piece.as_mut_ptr(), piece.len());
        }
        let mut page = 0;
        for run in piece
            .chunks(PAGE_SIZE as usize)
            .map(|page| skip_zero && is_zero(page))
            .collect::<Vec<_>>()
            .chunk_by(|one, other| one == other)
        {
            let (start, len) = (page * PAGE_SIZE, run.len() as u64 * PAGE_SIZE);
            page += run.len() as u64;
            if run.first() == Some(&true) {
                zeroes += run.len() as u64;
                continue;
            }
            let bytes = piece
                .get(start as usize..(start + len) as usize)
                .unwrap_or_default();
            write_all(file, bytes, first * PAGE_SIZE + start)?;
        }
        first += count;
    }
    Ok(zeroes)
}

fn write_all(file: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                offset += n as u64;
                bytes = bytes.get(n..).unwrap_or_default();
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::RamLayout;

    fn poke(ram: &GuestRam, page: u64, byte: u8) {
        ram.memory()
            .write_slice(&[byte; PAGE_SIZE as usize], GuestAddress(page * PAGE_SIZE))
            .unwrap();
    }

    fn set(pages: &[(u64, u64)]) -> PageSet {
        let range = |&(first, count)| PageRange { first, count };
        PageSet::new(pages.iter().map(range).collect())
    }

    #[test]
    fn a_page_that_became_zero_is_written_over_its_copy() {
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        ram.map_zero().unwrap();
        let file = tempfile::tempfile().unwrap();
        ram.size_file(file.as_fd()).unwrap();
        poke(&ram, 100, 7);
        poke(&ram, 300, 8);
        let mut early = EarlyCopy::default();
        early
            .copy(&ram, file.as_fd(), &set(&[(98, 5), (200, 70), (300, 1)]))
            .unwrap();
        assert_eq!(file.metadata().unwrap().blocks() * 512, 2 * PAGE_SIZE);
        let report = early.report(vec![]);
        assert_eq!((report.written, report.zero), (2, 74));
        poke(&ram, 100, 0);
        early.copy(&ram, file.as_fd(), &set(&[(100, 1)])).unwrap();
        let byte = |page: u64| {
            let mut byte = [1];
            file.read_exact_at(&mut byte, page * PAGE_SIZE).unwrap();
            byte[0]
        };
        assert_eq!([byte(99), byte(100), byte(300)], [0, 0, 8]);
    }

    #[test]
    fn what_changed_or_was_not_copied_is_missing() {
        let early = EarlyCopy {
            copied: set(&[(10, 10)]),
            ..EarlyCopy::default()
        };
        let mut early = early;
        let (wanted, changed) = (set(&[(8, 8), (30, 1)]), set(&[(12, 2), (40, 1)]));
        let missing = early.missing(&wanted, &changed);
        assert_eq!(missing, set(&[(8, 2), (12, 2), (30, 1)]));
        early.outdate(&set(&[(15, 1), (50, 1)]));
        let missing = early.missing(&wanted, &changed);
        assert_eq!(missing, set(&[(8, 2), (12, 2), (15, 1), (30, 1)]));
    }

    #[test]
    fn pages_past_the_end_are_refused() {
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        ram.map_zero().unwrap();
        let file = tempfile::tempfile().unwrap();
        let past = set(&[((64 << 20) / PAGE_SIZE - 1, 2)]);
        let copied = EarlyCopy::default().copy(&ram, file.as_fd(), &past);
        assert!(copied.is_err());
    }
}
