//! Changed pages: finding them, marking them, and restoring them.
//!
//! All sets are by page number in RAM. A page counts as changed if it is private now and was not marked as
//! seen, or if the guest gave it back. None of these functions stops the guest; callers that need one moment in
//! time stop it themselves.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use forkd_sys::{PageRange, Pagemap, TrackError, WriteTracker};

use crate::{GuestRam, ImageLayers, MemoryError, PAGE_SIZE, PageSet};

/// How many pages are marked by one call while the VM runs: 8 MiB.
const MARKED_AT_ONCE: u64 = 2048;

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

    /// As [`GuestRam::touched_set`], and marks the pages, while the VM runs. KVM unmaps a range from the guest
    /// until its call is over, so each call covers a small part of memory.
    pub fn mark_touched(&self, pagemap: &Pagemap) -> Result<PageSet, MemoryError> {
        let pages = u64::from(self.layout().pages());
        let mut found = Vec::new();
        for first in (0..pages).step_by(MARKED_AT_ONCE as usize) {
            let count = MARKED_AT_ONCE.min(pages - first);
            let (address, len) = self.place(PageRange { first, count })?;
            found.extend(pagemap.mark(address, len)?.iter().map(|range| PageRange {
                first: first + range.first,
                count: range.count,
            }));
        }
        Ok(PageSet::new(found))
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

    /// Marks pages as not written.
    pub fn mark(&self, pagemap: &Pagemap, pages: &PageSet) -> Result<(), MemoryError> {
        for range in pages.ranges() {
            let (address, len) = self.place(*range)?;
            pagemap.mark(address, len)?;
        }
        Ok(())
    }

    /// Marks every page as not written, by one call. The machine is stopped: KVM unmaps all of memory meanwhile.
    pub fn mark_all(&self, pagemap: &Pagemap) -> Result<(), MemoryError> {
        let address = self.base().as_ptr() as u64;
        pagemap.mark(address, self.layout().bytes())?;
        Ok(())
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
