//! Changed pages: finding them, marking them, and restoring them.
//!
//! All sets are by page number in RAM. A page counts as changed if it is private now and was not marked as
//! seen, or if the guest gave it back. None of these functions stops the guest; callers that need one moment in
//! time stop it themselves.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use forkd_sys::{PageRange, Pagemap, TrackError, WriteTracker};

use crate::plan::join;
use crate::{GuestRam, ImageLayers, MemoryError, PAGE_SIZE, PageSet};

/// How many pages are marked by one call: 8 MiB. KVM unmaps the range of a call from the guest until the call is over.
const MARKED_AT_ONCE: u64 = 2048;
/// Gaps of at most this many pages are part of a call. A call costs about as much as the page faults by which the guest
/// gets the pages of such a gap back.
const SMALL_GAP: u64 = 4;
/// With more calls than this, larger gaps become part of them.
const MANY_CALLS: usize = 512;

impl GuestRam {
    /// Makes the kernel follow writes from now on. Every page counts as written until it is marked.
    pub fn follow_writes(&self, tracker: &WriteTracker) -> Result<(), TrackError> {
        tracker.follow(self.base().as_ptr() as u64, self.layout().bytes())
    }

    /// The private pages of the VM.
    pub fn private_set(&self, pagemap: &Pagemap) -> Result<PageSet, MemoryError> {
        Ok(PageSet::new(self.private_pages(pagemap)?))
    }

    /// The pages that were mapped or written since they were marked.
    pub fn touched_set(&self, pagemap: &Pagemap) -> Result<PageSet, MemoryError> {
        let address = self.base().as_ptr() as u64;
        let ranges = pagemap.touched_pages(address, self.layout().bytes())?;
        Ok(PageSet::new(ranges))
    }

    /// As [`GuestRam::touched_set`], and marks the pages, while the VM may run. A page that is touched meanwhile is
    /// either in the set or not marked.
    pub fn mark_touched(&self, pagemap: &Pagemap) -> Result<PageSet, MemoryError> {
        self.mark(pagemap, &self.touched_set(pagemap)?)
    }

    /// The pages that the guest gave back since the last call.
    pub fn discarded_set(&self) -> PageSet {
        PageSet::new(self.take_discarded())
    }

    /// The private pages among `pages`.
    pub fn own_among(&self, pagemap: &Pagemap, pages: &PageSet) -> Result<PageSet, MemoryError> {
        /// With more ranges, one scan of all RAM is cheaper.
        const FEW: usize = 64;
        let mut own = Vec::new();
        if pages.ranges().len() > FEW {
            return Ok(pages.split(&self.private_set(pagemap)?).0);
        }
        for range in pages.ranges() {
            let (address, len) = self.place(*range)?;
            for found in pagemap.private_pages(address, len)? {
                own.push(PageRange {
                    first: range.first + found.first,
                    count: found.count,
                });
            }
        }
        Ok(PageSet::new(own))
    }

    /// Marks pages as not written, and pages in small gaps between them. Returns those that were touched before.
    ///
    /// KVM unmaps all pages of a call from the guest, also those that were not touched, and the guest gets each of them
    /// back by a page fault. So the calls cover little more than `pages`.
    pub fn mark(&self, pagemap: &Pagemap, pages: &PageSet) -> Result<PageSet, MemoryError> {
        let mut found = Vec::new();
        for span in spans(pages.ranges()) {
            let (address, len) = self.place(span)?;
            found.extend(pagemap.mark(address, len)?.iter().map(|range| PageRange {
                first: span.first + range.first,
                count: range.count,
            }));
        }
        Ok(PageSet::new(found))
    }

    /// The pages among `pages` that a forked child does not share any more: they were written here since the
    /// fork. The child must still exist.
    pub fn unshared(&self, pagemap: &Pagemap, pages: &PageSet) -> Result<PageSet, MemoryError> {
        let mut found = Vec::new();
        for range in pages.ranges() {
            let (address, len) = self.place(*range)?;
            for own in pagemap.unshared_pages(address, len)? {
                found.push(PageRange {
                    first: range.first + own.first,
                    count: own.count,
                });
            }
        }
        Ok(PageSet::new(found))
    }

    /// Drops private pages, so that they read as the image, or as zero without one.
    pub fn drop_private(&self, pages: &PageSet) -> Result<(), MemoryError> {
        for range in pages.ranges() {
            self.place(*range)?;
            self.advise(
                range.first * PAGE_SIZE,
                range.count * PAGE_SIZE,
                libc::MADV_DONTNEED,
            )?;
        }
        Ok(())
    }

    /// Maps a file that has page N at offset N pages over pages, copy-on-write: they read as the file from now on. A
    /// [`WriteTracker`] does not follow the new mappings.
    ///
    /// No vCPU and no device may run meanwhile.
    pub fn map_file(&self, file: BorrowedFd<'_>, pages: &PageSet) -> Result<(), MemoryError> {
        for range in pages.ranges() {
            let (_, len) = self.place(*range)?;
            let offset = range.first * PAGE_SIZE;
            self.map_fixed(offset, len, Some((file, offset)))?;
        }
        Ok(())
    }

    /// Maps pages as they were mapped first: they read as the image, or as zero without one. A [`WriteTracker`] does not
    /// follow the new mappings.
    ///
    /// No vCPU and no device may run meanwhile.
    pub fn map_as_started(&self, pages: &PageSet) -> Result<(), MemoryError> {
        for range in pages.ranges() {
            let (_, len) = self.place(*range)?;
            // The image may leave pages out.
            self.map_fixed(range.first * PAGE_SIZE, len, None)?;
            let extents = self.image().map_or(&[][..], |image| image.map().extents());
            for extent in extents {
                let (start, from) = (u64::from(extent.first), u64::from(extent.layer_first));
                let first = range.first.max(start);
                let end = range.end().min(start + u64::from(extent.count));
                let layer = self.image().map(ImageLayers::layers);
                if let Some(file) = layer.and_then(|all| all.get(extent.layer as usize))
                    && first < end
                {
                    let at = (from + first - start) * PAGE_SIZE;
                    let len = (end - first) * PAGE_SIZE;
                    self.map_fixed(first * PAGE_SIZE, len, Some((file.as_fd(), at)))?;
                }
            }
        }
        Ok(())
    }

    /// Fills pages from a file that has page N at offset N pages.
    ///
    /// No vCPU and no device may run meanwhile.
    pub fn read_back(&self, file: BorrowedFd<'_>, pages: &PageSet) -> Result<(), MemoryError> {
        for range in pages.ranges() {
            let (address, len) = self.place(*range)?;
            let mut done = 0;
            while done < len {
                let offset = range.first * PAGE_SIZE + done;
                // SAFETY: the range lies inside the reservation, checked by `place`, which is mapped
                // writable; nothing in this process holds a reference into guest memory.
                let got = unsafe {
                    libc::pread(
                        file.as_raw_fd(),
                        (address + done) as *mut libc::c_void,
                        (len - done) as usize,
                        offset as libc::off_t,
                    )
                };
                match got {
                    0 => return Err(MemoryError::ReadBack(io::ErrorKind::UnexpectedEof.into())),
                    1.. => done += got as u64,
                    _ => {
                        let error = io::Error::last_os_error();
                        if error.kind() != io::ErrorKind::Interrupted {
                            return Err(MemoryError::ReadBack(error));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Address and length of pages in this process.
    fn place(&self, range: PageRange) -> Result<(u64, u64), MemoryError> {
        if range.end() > u64::from(self.layout().pages()) {
            return Err(MemoryError::Range {
                guest: range.first.saturating_mul(PAGE_SIZE),
                len: range.count.saturating_mul(PAGE_SIZE),
            });
        }
        let address = self.base().as_ptr() as u64 + range.first * PAGE_SIZE;
        Ok((address, range.count * PAGE_SIZE))
    }
}

/// The parts of memory that are marked by one call each.
fn spans(ranges: &[PageRange]) -> Vec<PageRange> {
    let mut gap = SMALL_GAP;
    let mut joined = join(ranges, gap);
    while joined.len() > MANY_CALLS {
        gap *= 4;
        joined = join(&joined, gap);
    }
    let pieces = |span: PageRange| {
        let starts = (span.first..span.end()).step_by(MARKED_AT_ONCE as usize);
        starts.map(move |first| PageRange {
            first,
            count: MARKED_AT_ONCE.min(span.end() - first),
        })
    };
    joined.into_iter().flat_map(pieces).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, count: u64) -> PageRange {
        PageRange { first, count }
    }

    #[test]
    fn calls_cover_touched_pages_and_small_gaps() {
        let ranges = [range(1, 2), range(3 + SMALL_GAP, 1), range(100, 1)];
        let spans = spans(&ranges);
        assert_eq!(spans, [range(1, 3 + SMALL_GAP), range(100, 1)]);
    }

    #[test]
    fn a_long_run_is_marked_in_pieces() {
        let spans = spans(&[range(7, 2 * MARKED_AT_ONCE + 1)]);
        let counts: Vec<_> = spans.iter().map(|span| span.count).collect();
        assert_eq!(counts, [MARKED_AT_ONCE, MARKED_AT_ONCE, 1]);
        assert_eq!(spans[2].first, 7 + 2 * MARKED_AT_ONCE);
    }

    #[test]
    fn scattered_pages_do_not_need_a_call_each() {
        let far: Vec<_> = (0..20_000).map(|n| range(n * 50, 1)).collect();
        let spans = spans(&far);
        assert!(spans.len() <= MANY_CALLS, "{}", spans.len());
        let covered = |page: u64| spans.iter().any(|s| s.first <= page && page < s.end());
        assert!(far.iter().all(|one| covered(one.first)));
    }
}
