//! The page map of this process: which pages of a mapping are private, touched or shared.
//!
//! [`Pagemap`] uses the `PAGEMAP_SCAN` request (Linux 6.7) where the kernel has it and reads
//! `/proc/self/pagemap` otherwise. Marks exist with the request only, and only on memory that a
//! [`crate::WriteTracker`] follows. Errors lean to "changed": a page that is swapped, migrating or absent
//! counts as written.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::process::Pid;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use thiserror::Error;

const PAGE: u64 = 4096;

// linux/fs.h, since 6.7
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PM_SCAN_WP_MATCHING: u64 = 1;
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;

// Documentation/admin-guide/mm/pagemap.rst
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_FILE: u64 = 1 << 61;
const ENTRY_EXCLUSIVE: u64 = 1 << 56;

/// Pages `first..first + count` of the range that was asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRange {
    /// The first page.
    pub first: u64,
    pub count: u64,
}

impl PageRange {
    /// The page after the last.
    pub fn end(self) -> u64 {
        self.first + self.count
    }
}

/// Why the page map could not be read.
#[derive(Debug, Error)]
pub enum PagemapError {
    /// The file cannot be opened.
    #[error("cannot open the page map of this process")]
    Open(#[source] io::Error),
    /// The file cannot be read.
    #[error("cannot read the page map of this process")]
    Read(#[source] io::Error),
    /// The descriptor shows another address space.
    #[error("the page map is that of another process")]
    Foreign,
    /// No page map was handed over.
    #[error("this process was given no page map")]
    Missing,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

#[repr(C)]
#[derive(Debug, Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// The page map of this process, opened once.
///
/// The file stays bound to the address space it was opened in: after a fork the child's copy still shows
/// the parent.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    has_scan: bool,
}

/// Opens the page map of a process for that process to use.
///
/// The file shows physical frame numbers to its readers if the opener has `CAP_SYS_ADMIN`, so the
/// capability is set aside while the file is opened. Only the calling thread loses it for that moment.
pub fn open_pagemap(pid: Pid) -> io::Result<OwnedFd> {
    let path = format!("/proc/{}/pagemap", pid.as_raw_nonzero());
    let sets = capabilities(None)?;
    if !sets.effective.contains(CapabilitySet::SYS_ADMIN) {
        return Ok(File::open(path)?.into());
    }
    let without = CapabilitySets {
        effective: sets.effective - CapabilitySet::SYS_ADMIN,
        ..sets
    };
    set_capabilities(None, without)?;
    let opened = File::open(path);
    set_capabilities(None, sets)?;
    Ok(opened?.into())
}

/// The kind of pages a query selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// Pages that belong to this process alone.
    Private,
    /// Pages mapped or written since they were marked, private or not.
    Touched,
    /// As `Touched`, and marks them.
    Mark,
    /// Pages of a range shared with a forked process that are not shared any more.
    Unshared,
    /// All pages that are mapped or swapped out.
    Mapped,
}

impl Pagemap {
    /// Opens the page map of this process by its path. A VMM opens no path: it uses [`Pagemap::from_fd`].
    pub fn open() -> Result<Self, PagemapError> {
        let file = File::open("/proc/self/pagemap").map_err(PagemapError::Open)?;
        Ok(Self::from_file(file))
    }

    /// Takes over an open page map of this process. That of another process is refused: a cut made with it would
    /// lack pages.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, PagemapError> {
        let map = Self::from_file(File::from(fd));
        if map.is_of_this_process()? {
            Ok(map)
        } else {
            Err(PagemapError::Foreign)
        }
    }

    /// A new page of this process is absent before its first write and present after it. Another address space
    /// does not follow.
    fn is_of_this_process(&self) -> Result<bool, PagemapError> {
        // SAFETY: a new mapping of one page at an address of the kernel's choice.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return Err(PagemapError::Read(io::Error::last_os_error()));
        }
        let before = self.mapped_pages(page as u64, PAGE);
        // SAFETY: the mapping made above, writable and of this length.
        unsafe { page.cast::<u8>().write_volatile(1) };
        let after = self.mapped_pages(page as u64, PAGE);
        // SAFETY: the mapping made above, which nothing else knows of.
        unsafe { libc::munmap(page, PAGE as usize) };
        Ok(before?.is_empty() && !after?.is_empty())
    }

    fn from_file(file: File) -> Self {
        let mut map = Self {
            file,
            has_scan: true,
        };
        let probe = Box::new([0u8; PAGE as usize]);
        let at = probe.as_ptr() as u64 & !(PAGE - 1);
        map.has_scan = map
            .scan(at, at + PAGE, Wanted::Mapped, &mut Vec::new())
            .is_ok();
        map
    }

    /// The pages of `len` bytes at `address` that this process has made its own: written to in a private
    /// mapping, whether of a file or of nothing. Pages that are only read, and the kernel's shared zero
    /// page where it can be told apart, are not among them.
    pub fn private_pages(&self, address: u64, len: u64) -> Result<Vec<PageRange>, PagemapError> {
        self.pages(address, len, Wanted::Private)
    }

    /// The pages that were mapped or written since they were marked; all mapped pages if none was marked.
    /// Telling private pages from shared ones costs far more and is a separate query.
    pub fn touched_pages(&self, address: u64, len: u64) -> Result<Vec<PageRange>, PagemapError> {
        self.pages(address, len, Wanted::Touched)
    }

    /// As [`Pagemap::touched_pages`], and marks them. Only what a [`crate::WriteTracker`] follows can be
    /// marked.
    pub fn mark(&self, address: u64, len: u64) -> Result<Vec<PageRange>, PagemapError> {
        self.pages(address, len, Wanted::Mark)
    }

    /// The pages that no other process has too, among them those that are not there at all.
    pub fn unshared_pages(&self, address: u64, len: u64) -> Result<Vec<PageRange>, PagemapError> {
        self.pages(address, len, Wanted::Unshared)
    }

    /// Whether marks can be read and set at all.
    pub fn has_marks(&self) -> bool {
        self.has_scan
    }

    /// The pages that are mapped at all, read or written.
    pub fn mapped_pages(&self, address: u64, len: u64) -> Result<Vec<PageRange>, PagemapError> {
        self.pages(address, len, Wanted::Mapped)
    }

    fn pages(
        &self,
        address: u64,
        len: u64,
        wanted: Wanted,
    ) -> Result<Vec<PageRange>, PagemapError> {
        let mut ranges = Vec::new();
        let end = address + len;
        if self.has_scan && wanted != Wanted::Unshared {
            self.scan(address, end, wanted, &mut ranges)
        } else {
            self.walk(address, end, wanted, &mut ranges)
        }
        .map_err(PagemapError::Read)?;
        Ok(ranges)
    }

    fn scan(
        &self,
        start: u64,
        end: u64,
        wanted: Wanted,
        out: &mut Vec<PageRange>,
    ) -> io::Result<()> {
        // Every other page is a region at most.
        let most = ((end - start) / PAGE).div_ceil(2).clamp(1, 1024);
        let mut regions = vec![PageRegion::default(); most as usize];
        let mut at = start;
        while at < end {
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                start: at,
                end,
                vec: regions.as_mut_ptr() as u64,
                vec_len: regions.len() as u64,
                category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                ..ScanArg::default()
            };
            match wanted {
                Wanted::Private => {
                    arg.category_inverted = PAGE_IS_FILE | PAGE_IS_PFNZERO;
                    arg.category_mask = PAGE_IS_FILE | PAGE_IS_PFNZERO;
                }
                Wanted::Touched => arg.category_mask = PAGE_IS_WRITTEN,
                Wanted::Mark => {
                    arg.category_mask = PAGE_IS_WRITTEN;
                    arg.flags = PM_SCAN_WP_MATCHING;
                }
                Wanted::Mapped | Wanted::Unshared => {}
            }
            // SAFETY: `arg` has the layout of struct pm_scan_arg, its size is given in it, and `vec`
            // points to `vec_len` writable elements that outlive the call.
            let found = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &mut arg) };
            if found < 0 {
                let error = io::Error::last_os_error();
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                return Err(error);
            }
            for region in regions.iter().take(found as usize) {
                push(
                    out,
                    (region.start - start) / PAGE,
                    (region.end - region.start) / PAGE,
                );
            }
            if arg.walk_end <= at {
                break;
            }
            at = arg.walk_end;
        }
        Ok(())
    }

    fn walk(
        &self,
        start: u64,
        end: u64,
        wanted: Wanted,
        out: &mut Vec<PageRange>,
    ) -> io::Result<()> {
        let mut buffer = vec![0u8; 64 * 1024];
        let pages = (end - start) / PAGE;
        let mut page = 0;
        while page < pages {
            let want = ((pages - page) * 8).min(buffer.len() as u64) as usize;
            let chunk = &mut buffer[..want];
            self.file.read_exact_at(chunk, (start / PAGE + page) * 8)?;
            for entry in chunk.as_chunks::<8>().0 {
                let entry = u64::from_ne_bytes(*entry);
                let mapped = entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0;
                let own = entry & ENTRY_FILE == 0;
                let found = match wanted {
                    Wanted::Mapped | Wanted::Touched | Wanted::Mark => mapped,
                    Wanted::Unshared => entry & ENTRY_PRESENT == 0 || entry & ENTRY_EXCLUSIVE != 0,
                    Wanted::Private => mapped && own,
                };
                if found {
                    push(out, page, 1);
                }
                page += 1;
            }
        }
        Ok(())
    }
}

fn push(out: &mut Vec<PageRange>, first: u64, count: u64) {
    match out.last_mut() {
        Some(last) if last.end() == first => last.count += count,
        _ => out.push(PageRange { first, count }),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn private_file_mapping(pages: usize) -> (*mut u8, usize) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![7u8; pages * PAGE as usize]).unwrap();
        let len = pages * PAGE as usize;
        // SAFETY: a fresh mapping of an open file at an address the kernel chooses.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED);
        (at.cast(), len)
    }

    fn written_pages_are_found(map: &Pagemap) {
        let (at, len) = private_file_mapping(64);
        for page in [3usize, 4, 9, 63] {
            // SAFETY: inside the mapping made above.
            unsafe { at.add(page * PAGE as usize).write_volatile(1) };
        }
        // SAFETY: inside the mapping made above.
        assert_eq!(unsafe { at.add(20 * PAGE as usize).read_volatile() }, 7);
        let got = map.private_pages(at as u64, len as u64).unwrap();
        let want = [(3, 2), (9, 1), (63, 1)].map(|(first, count)| PageRange { first, count });
        assert_eq!(got, want);
        assert!(
            map.mapped_pages(at as u64, len as u64)
                .unwrap()
                .iter()
                .any(|r| (r.first..r.end()).contains(&20))
        );
        // SAFETY: the mapping made above, which nothing uses any more.
        unsafe { libc::munmap(at.cast(), len) };
    }

    #[test]
    fn written_pages_are_told_from_read_ones() {
        written_pages_are_found(&Pagemap::open().unwrap());
    }

    #[test]
    fn marked_pages_count_again_once_they_are_written() {
        let map = Pagemap::open().unwrap();
        let Ok(tracker) = crate::WriteTracker::open() else {
            crate::testing::leave_out("write-tracking");
            return;
        };
        let (at, len) = private_file_mapping(64);
        let write = |page: usize| {
            // SAFETY: inside the mapping made above.
            unsafe { at.add(page * PAGE as usize).write_volatile(1) };
        };
        let touched = || map.touched_pages(at as u64, len as u64).unwrap();
        let range = |first, count| PageRange { first, count };
        (3..9).for_each(write);
        tracker.follow(at as u64, len as u64).unwrap();
        assert!(touched().contains(&range(3, 6)));
        let marked = map.mark(at as u64, len as u64).unwrap();
        assert!(marked.contains(&range(3, 6)));
        assert_eq!(touched(), []);
        assert_eq!(
            map.private_pages(at as u64, len as u64).unwrap(),
            [range(3, 6)]
        );
        [4, 20].into_iter().for_each(write);
        assert_eq!(touched(), [range(4, 1), range(20, 1)]);
        // SAFETY: the mapping made above, which nothing uses any more.
        unsafe { libc::munmap(at.cast(), len) };
    }

    #[test]
    fn a_page_map_of_another_process_is_refused() {
        let own = File::open("/proc/self/pagemap").unwrap();
        assert!(Pagemap::from_fd(own.into()).is_ok());
        let mut child = std::process::Command::new("/bin/cat")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // An answer shows that the child has its own address space by now.
        let mut byte = [0];
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"x").unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut byte).unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let foreign = crate::open_pagemap(pid).unwrap();
        assert!(matches!(
            Pagemap::from_fd(foreign),
            Err(PagemapError::Foreign)
        ));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Frame numbers of the host help attacks on its memory, so the descriptor must not show them even if the
    /// opener is privileged.
    #[test]
    fn a_page_map_for_a_vmm_shows_no_frame_numbers() {
        let map = File::from(crate::open_pagemap(rustix::process::getpid()).unwrap());
        let page = Box::new([1u8; PAGE as usize]);
        let at = std::hint::black_box(page.as_ptr()) as u64 / PAGE;
        let mut entry = [0; 8];
        map.read_exact_at(&mut entry, at * 8).unwrap();
        let entry = u64::from_ne_bytes(entry);
        assert_ne!(entry & ENTRY_PRESENT, 0);
        assert_eq!(entry & ((1 << 55) - 1), 0);
    }

    #[test]
    fn so_they_are_without_the_scan_call() {
        let mut map = Pagemap::open().unwrap();
        map.has_scan = false;
        written_pages_are_found(&map);
    }
}
