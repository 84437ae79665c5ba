//! Writing frozen memory to a file while the VM goes on.
//!
//! [`GuestRam::write_frozen`] forks a child, which has the memory of that moment and makes nothing but system
//! calls: no allocation, no lock. [`Written`] is the parent's handle. The child reports through a shared page
//! and stays until [`Written::release`], since shared pages are what tells late writes from earlier ones.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use forkd_sys::{ChildWriter, ForkError, PageRange};
use forkd_vmm_proto::Change;
use rustix::thread::futex;

use crate::plan::changes;
use crate::{EarlyCopy, GuestRam, PAGE_SIZE, PageSet, WritePlan};

const CHUNK_PAGES: u64 = 256;
/// How much the writer steps back behind the guest.
const WRITER_NICE: i32 = 10;
const OK: u8 = 0;
const FAILED: u8 = 1;

/// The page that the child reports through.
#[repr(C)]
struct Shared {
    written: AtomicU64,
    zero: AtomicU64,
    errno: AtomicI32,
    /// The child may go.
    released: AtomicU32,
}

/// A mapping that parent and child share.
struct Board {
    at: NonNull<u8>,
}

// SAFETY: the mapping is owned by this object, and everything in it is accessed atomically.
unsafe impl Send for Board {}

impl Board {
    fn new() -> io::Result<Self> {
        // SAFETY: a new mapping at an address the kernel chooses.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE_SIZE as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        match NonNull::new(at.cast::<u8>()) {
            Some(at) if at.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { at }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the mapping is page-aligned, longer than the structure, zero-filled (valid for
        // atomics) and lives as long as this object.
        unsafe { self.at.cast::<Shared>().as_ref() }
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and nothing refers to it any more.
        unsafe { libc::munmap(self.at.as_ptr().cast(), PAGE_SIZE as usize) };
    }
}

/// A write that goes on in the background.
pub struct Written {
    child: ChildWriter,
    board: Board,
    plan: WritePlan,
    /// The pages that the file had before, and the runs of the whole cut.
    early: Option<WriteReport>,
}

/// How a write ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteReport {
    /// Pages in the file.
    pub written: u64,
    /// Pages looked at that were zero and are holes.
    pub zero: u64,
    /// The runs of pages looked at: the file has them all, the zero ones as holes.
    pub ranges: Vec<PageRange>,
}

impl WriteReport {
    /// The runs as changes to the page map of the image that came before.
    pub fn changes(&self) -> Vec<Change> {
        changes(&self.ranges)
    }
}

/// Result of the child.
#[derive(Debug)]
pub enum WriteOutcome {
    /// All pages are written, not synced.
    Done(WriteReport),
    /// A system call failed.
    Failed(io::Error),
}

impl GuestRam {
    /// Makes an empty file as long as RAM, for [`GuestRam::write_frozen`].
    pub fn size_file(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        Ok(rustix::fs::ftruncate(file, self.layout().bytes())?)
    }

    /// Forks a child that writes the pages of `plan` to `file`, page N at offset N pages.
    /// The file has been made as long as RAM, and is empty otherwise. The child stays until [`Written::release`], so
    /// that [`GuestRam::unshared`] can be asked meanwhile.
    ///
    /// No vCPU and no device may run from the moment to be kept until this function returns.
    pub fn write_frozen(
        &self,
        plan: WritePlan,
        file: BorrowedFd<'_>,
    ) -> Result<Written, ForkError> {
        self.write_rest(plan, file, &PageSet::default())
    }

    /// As [`GuestRam::write_frozen`], for a file that has the pages of `copied` already: of `plan`, only those in
    /// `missing` are written, and a page that the file has is written even if it is zero.
    pub fn write_missing(
        &self,
        plan: WritePlan,
        file: BorrowedFd<'_>,
        early: &EarlyCopy,
        missing: &PageSet,
    ) -> Result<Written, ForkError> {
        let (again, new) = missing.split(early.pages());
        let report = early.report(plan.ranges);
        let new = WritePlan {
            ranges: new.ranges().to_vec(),
        };
        let mut written = self.write_rest(new, file, &again)?;
        written.early = Some(report);
        Ok(written)
    }

    fn write_rest(
        &self,
        plan: WritePlan,
        file: BorrowedFd<'_>,
        again: &PageSet,
    ) -> Result<Written, ForkError> {
        let board = Board::new().map_err(ForkError::Fork)?;
        let base = self.base();
        let total = u64::from(self.layout().pages());
        let child = ChildWriter::fork(|| {
            // The guest goes first.
            let _ = rustix::process::nice(WRITER_NICE);
            let job = Job {
                base,
                file,
                board: &board,
            };
            let result = job
                .write(&plan, total)
                .and_then(|()| job.write_again(again, total));
            job.wait_for_release();
            match result {
                Ok(()) => OK,
                Err(errno) => {
                    let told = &board.shared().errno;
                    told.store(errno.raw_os_error(), Ordering::Relaxed);
                    FAILED
                }
            }
        })?;
        Ok(Written {
            child,
            board,
            plan,
            early: None,
        })
    }
}

/// Readable once the child has ended.
impl AsFd for Written {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.child.as_fd()
    }
}

impl Written {
    /// Lets the child go when it has written everything.
    pub fn release(&self) {
        let released = &self.board.shared().released;
        released.store(1, Ordering::Release);
        // Whether or not the child waits yet, it sees the flag.
        let _ = futex::wake(released, futex::Flags::empty(), 1);
    }

    /// Waits for the end.
    pub fn finish(self) -> Result<WriteOutcome, ForkError> {
        self.release();
        let status = self.child.wait()?;
        let shared = self.board.shared();
        if status != OK {
            let errno = shared.errno.load(Ordering::Relaxed);
            return Ok(WriteOutcome::Failed(io::Error::from_raw_os_error(errno)));
        }
        let before = self.early.unwrap_or(WriteReport {
            written: 0,
            zero: 0,
            ranges: self.plan.ranges,
        });
        Ok(WriteOutcome::Done(WriteReport {
            written: before.written + shared.written.load(Ordering::Relaxed),
            zero: before.zero + shared.zero.load(Ordering::Relaxed),
            ranges: before.ranges,
        }))
    }
}

/// The work of the child. No allocation and no lock from here on down.
struct Job<'a> {
    base: NonNull<u8>,
    file: BorrowedFd<'a>,
    board: &'a Board,
}

impl Job<'_> {
    fn write(&self, plan: &WritePlan, total: u64) -> rustix::io::Result<()> {
        for range in plan.ranges.iter().filter(|range| range.end() <= total) {
            self.write_range(*range)?;
        }
        Ok(())
    }

    /// Writes pages that the file has in an older version. Zero pages are not left out.
    fn write_again(&self, pages: &PageSet, total: u64) -> rustix::io::Result<()> {
        for range in pages.ranges().iter().filter(|range| range.end() <= total) {
            self.write_all(range.first, range.count)?;
        }
        Ok(())
    }

    fn wait_for_release(&self) {
        let released = &self.board.shared().released;
        while released.load(Ordering::Acquire) == 0 {
            // The wait may end early; the flag decides.
            let _ = futex::wait(released, futex::Flags::empty(), 0, None);
        }
    }

    fn write_range(&self, range: PageRange) -> rustix::io::Result<()> {
        let mut page = range.first;
        while page < range.end() {
            let mut zeroes = 0;
            while page + zeroes < range.end() && is_zero(self.pages(page + zeroes, 1)) {
                zeroes += 1;
            }
            self.board
                .shared()
                .zero
                .fetch_add(zeroes, Ordering::Relaxed);
            page += zeroes;
            let mut count = 0;
            while page + count < range.end()
                && count < CHUNK_PAGES
                && !is_zero(self.pages(page + count, 1))
            {
                count += 1;
            }
            self.write_all(page, count)?;
            self.board
                .shared()
                .written
                .fetch_add(count, Ordering::Relaxed);
            page += count;
        }
        Ok(())
    }

    fn write_all(&self, page: u64, count: u64) -> rustix::io::Result<()> {
        let mut bytes = self.pages(page, count);
        let mut offset = page * PAGE_SIZE;
        while !bytes.is_empty() {
            match rustix::io::pwrite(self.file, bytes, offset) {
                Ok(0) => return Err(rustix::io::Errno::IO),
                Ok(n) => {
                    offset += n as u64;
                    bytes = bytes.get(n..).unwrap_or_default();
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn pages(&self, first: u64, count: u64) -> &[u8] {
        // SAFETY: the caller keeps to ranges inside guest RAM; in this process no vCPU and no device
        // runs, so the bytes do not change while the slice lives.
        unsafe {
            std::slice::from_raw_parts(
                self.base.as_ptr().add((first * PAGE_SIZE) as usize),
                (count * PAGE_SIZE) as usize,
            )
        }
    }
}

pub(crate) fn is_zero(page: &[u8]) -> bool {
    // SAFETY: any eight bytes are a valid u64.
    let (head, words, tail) = unsafe { page.align_to::<u64>() };
    head.iter().chain(tail).all(|&b| b == 0)
        && words
            .chunks(8)
            .all(|c| c.iter().fold(0, |acc, w| acc | w) == 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use forkd_sys::{Pagemap, WriteTracker};
    use forkd_vmm_proto::PageMap;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::{ImageLayers, RamLayout, plan_changed, plan_full};

    fn done(written: Written) -> WriteReport {
        match written.finish().unwrap() {
            WriteOutcome::Done(report) => report,
            WriteOutcome::Failed(e) => panic!("write failed: {e}"),
        }
    }

    fn poke(ram: &GuestRam, page: u64, byte: u8) {
        ram.memory()
            .write_slice(&[byte; PAGE_SIZE as usize], GuestAddress(page * PAGE_SIZE))
            .unwrap();
    }

    #[test]
    fn what_is_written_is_the_moment_of_the_fork() {
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        ram.map_zero().unwrap();
        for page in [1, 2, 700] {
            poke(&ram, page, 5);
        }
        poke(&ram, 3, 0);
        let file = tempfile::tempfile().unwrap();
        ram.size_file(file.as_fd()).unwrap();
        let plan = plan_full(ram.private_pages(&Pagemap::open().unwrap()).unwrap(), None);
        let written = ram.write_frozen(plan, file.as_fd()).unwrap();
        poke(&ram, 1, 6);
        let report = done(written);
        assert_eq!(report.written, 3);
        assert!(report.zero >= 1);
        let mut page = [0; PAGE_SIZE as usize];
        file.read_exact_at(&mut page, PAGE_SIZE).unwrap();
        assert!(page.iter().all(|&b| b == 5));
        let meta = file.metadata().unwrap();
        assert_eq!(meta.len(), 64 << 20);
        assert!(meta.blocks() * 512 < 1 << 20, "the file is not sparse");
    }

    #[test]
    fn a_page_that_became_zero_is_a_hole_over_the_old_one() {
        let base = tempfile::tempfile().unwrap();
        base.set_len(64 << 20).unwrap();
        for page in [10, 11] {
            base.write_all_at(&[1; PAGE_SIZE as usize], page * PAGE_SIZE)
                .unwrap();
        }
        let again = base.try_clone().unwrap();
        let map = PageMap::identity((64 << 20) / 4096);
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        ram.map_image(ImageLayers::new(map.clone(), vec![base.into()]).unwrap())
            .unwrap();
        poke(&ram, 10, 0);
        poke(&ram, 12, 3);
        let file = tempfile::tempfile().unwrap();
        ram.size_file(file.as_fd()).unwrap();
        let plan = plan_changed(ram.private_pages(&Pagemap::open().unwrap()).unwrap());
        let report = done(ram.write_frozen(plan, file.as_fd()).unwrap());
        assert_eq!((report.written, report.zero), (1, 1));

        let map = map.overlay(&report.changes()).unwrap();
        let child = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        child
            .map_image(ImageLayers::new(map, vec![again.into(), file.into()]).unwrap())
            .unwrap();
        let seen = [10u64, 11, 12].map(|page| {
            child
                .memory()
                .read_obj::<u8>(GuestAddress(page * PAGE_SIZE))
                .unwrap()
        });
        assert_eq!(seen, [0, 1, 3]);
    }

    #[test]
    fn what_changed_since_a_fork_is_known_and_can_be_put_back() {
        let (pagemap, tracker) = (Pagemap::open().unwrap(), WriteTracker::open());
        let Ok(tracker) = tracker else {
            forkd_sys::testing::leave_out("write-tracking");
            return;
        };
        let base = tempfile::tempfile().unwrap();
        base.set_len(64 << 20).unwrap();
        base.write_all_at(&[9; PAGE_SIZE as usize], 20 * PAGE_SIZE)
            .unwrap();
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        let map = PageMap::identity((64 << 20) / 4096);
        ram.map_image(ImageLayers::new(map, vec![base.into()]).unwrap())
            .unwrap();
        for page in [10, 11, 12] {
            poke(&ram, page, 1);
        }
        ram.follow_writes(&tracker).unwrap();
        ram.remember_discarded();
        let written_now = || {
            let touched = ram.touched_set(&pagemap).unwrap();
            ram.own_among(&pagemap, &touched).unwrap()
        };
        let changed = written_now();
        assert_eq!(changed.pages(), 3);
        let file = tempfile::tempfile().unwrap();
        ram.size_file(file.as_fd()).unwrap();
        let plan = plan_changed(changed.ranges().to_vec());
        let written = ram.write_frozen(plan, file.as_fd()).unwrap();
        // Before it is marked, after it is marked, and an untouched one.
        poke(&ram, 10, 2);
        ram.mark(&pagemap, &changed).unwrap();
        poke(&ram, 11, 2);
        let mut since = ram.unshared(&pagemap, &changed).unwrap();
        poke(&ram, 20, 2);
        since.add(&written_now());
        let pages: Vec<u64> = since
            .ranges()
            .iter()
            .flat_map(|r| r.first..r.end())
            .collect();
        assert_eq!(pages, [10, 11, 20]);
        done(written);

        let (in_file, in_base) = since.split(&changed);
        ram.read_back(file.as_fd(), &in_file).unwrap();
        ram.drop_private(&in_base).unwrap();
        let seen = [10u64, 11, 12, 20].map(|page| {
            ram.memory()
                .read_obj::<u8>(GuestAddress(page * PAGE_SIZE))
                .unwrap()
        });
        assert_eq!(seen, [1, 1, 1, 9]);
        ram.discard(12 * PAGE_SIZE, PAGE_SIZE).unwrap();
        assert_eq!(ram.discarded_set().pages(), 1);
    }

    #[test]
    fn a_target_that_cannot_be_written_is_reported() {
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        ram.map_zero().unwrap();
        poke(&ram, 1, 1);
        let sealed = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&sealed, 64 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
        let plan = plan_full(ram.private_pages(&Pagemap::open().unwrap()).unwrap(), None);
        let outcome = ram
            .write_frozen(plan, sealed.as_fd())
            .unwrap()
            .finish()
            .unwrap();
        assert!(
            matches!(outcome, WriteOutcome::Failed(e) if e.raw_os_error() == Some(libc::EPERM))
        );
    }
}
