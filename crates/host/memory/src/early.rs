//! Copying pages to a file before the machine stops.
//!
//! [`EarlyCopy`] is filled while the guest runs, from pages that were marked before: a page that is written after its
//! mark shows up as touched, and is copied again when the machine stands still. So a copy that was torn by a write is
//! never part of the cut.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use forkd_sys::PageRange;

use crate::{GuestRam, PAGE_SIZE, PageSet, WriteReport};

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
    if !skip_zero {
        write_pages(ram, file, range)?;
        return Ok(0);
    }
    let mut zeroes = 0;
    let mut first = range.first;
    for page in range.first..range.end() {
        if is_zero_now(ram, page) {
            write_pages(ram, file, run(first, page))?;
            first = page + 1;
            zeroes += 1;
        }
    }
    write_pages(ram, file, run(first, range.end()))?;
    Ok(zeroes)
}

fn run(first: u64, end: u64) -> PageRange {
    let count = end - first;
    PageRange { first, count }
}

/// Whether a page is zero while it is read. The guest may write it at the same time.
fn is_zero_now(ram: &GuestRam, page: u64) -> bool {
    const WORDS: usize = PAGE_SIZE as usize / size_of::<u64>();
    // SAFETY: the caller has checked that the page lies inside guest RAM, which stays mapped, and a page is aligned for
    // words. No reference to the page exists, and each word is read once.
    let word = |at: usize| unsafe {
        let page = ram.base().as_ptr().add((page * PAGE_SIZE) as usize);
        page.cast::<u64>().add(at).read_volatile()
    };
    (0..WORDS)
        .step_by(8)
        .all(|at| (at..at + 8).fold(0, |all, at| all | word(at)) == 0)
}

/// Writes pages straight from guest memory. The guest may write them at the same time, so the copy may be torn.
fn write_pages(ram: &GuestRam, file: BorrowedFd<'_>, range: PageRange) -> io::Result<()> {
    let (mut at, end) = (range.first * PAGE_SIZE, range.end() * PAGE_SIZE);
    while at < end {
        // SAFETY: the caller has checked that the pages lie inside guest RAM, which stays mapped. Only the kernel reads
        // them, as bytes.
        let got = unsafe {
            libc::pwrite(
                file.as_raw_fd(),
                ram.base().as_ptr().add(at as usize).cast(),
                (end - at) as usize,
                at as libc::off_t,
            )
        };
        match got {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            1.. => at += got as u64,
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
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
