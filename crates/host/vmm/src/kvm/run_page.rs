//! The page through which another thread calls a vCPU out of the guest.
//!
//! The flag `immediate_exit` closes the race between the kick signal and `KVM_RUN`: a signal that comes just
//! before the call would be lost without it.

use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use kvm_bindings::kvm_run;

use super::KvmError;

/// A second view of a vCPU's `kvm_run` page, of which only `immediate_exit` is touched.
///
/// The thread that runs the vCPU owns the first view; this one lets another thread set the flag while it
/// does.
#[derive(Debug)]
pub struct RunPage {
    page: NonNull<u8>,
}

// SAFETY: the mapping lives as long as the object, and the one byte that is touched is accessed atomically.
unsafe impl Send for RunPage {}
// SAFETY: as above.
unsafe impl Sync for RunPage {}

const PAGE: usize = 4096;

impl RunPage {
    pub(super) fn map(vcpu: RawFd) -> Result<Self, KvmError> {
        // SAFETY: a new mapping at an address the kernel chooses, of the first page of a vCPU.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu,
                0,
            )
        };
        NonNull::new(page.cast::<u8>())
            .filter(|p| p.as_ptr().cast() != libc::MAP_FAILED)
            .map(|page| Self { page })
            .ok_or_else(|| KvmError::Refused {
                action: "map the run page",
                source: std::io::Error::last_os_error(),
            })
    }

    fn flag(&self) -> &AtomicU8 {
        let offset = std::mem::offset_of!(kvm_run, immediate_exit);
        // SAFETY: the offset is inside the page; the kernel reads the byte, and it is written only
        // through such a view.
        unsafe { self.page.add(offset).cast::<AtomicU8>().as_ref() }
    }

    /// Makes the next or current `KVM_RUN` return as soon as a signal comes, and before the guest is
    /// entered.
    pub fn ask_exit(&self) {
        self.flag().store(1, Ordering::SeqCst);
    }

    /// Lets the guest be entered again.
    pub fn allow_entry(&self) {
        self.flag().store(0, Ordering::SeqCst);
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` and nothing refers to it any more.
        unsafe { libc::munmap(self.page.as_ptr().cast(), PAGE) };
    }
}
