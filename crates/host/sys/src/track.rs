//! Write tracking: which pages were written since they were marked.
//!
//! The kernel write-protects marked pages in its own tables and clears the mark at the first write, without a
//! fault that user space sees (asynchronous write protection, Linux 6.7). [`WriteTracker`] registers memory;
//! [`crate::Pagemap`] reads and sets the marks.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use thiserror::Error;

// linux/userfaultfd.h; asynchronous write protection is there since 6.7.
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const UFFDIO_REGISTER_MODE_WP: u64 = 1 << 1;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;

/// Why writes cannot be followed.
#[derive(Debug, Error)]
pub enum TrackError {
    /// The kernel is too old or does not allow it.
    #[error("this kernel does not follow writes to memory")]
    Unsupported(#[source] io::Error),
    /// A range cannot be followed.
    #[error("the kernel refused to follow writes to a range of memory")]
    Register(#[source] io::Error),
}

#[repr(C)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterArg {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// Lets the kernel follow writes to memory of this process.
#[derive(Debug)]
pub struct WriteTracker {
    fd: OwnedFd,
}

impl WriteTracker {
    /// Asks the kernel. Do it before the process gives its rights away.
    pub fn open() -> Result<Self, TrackError> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
        // SAFETY: a system call without pointers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = match i32::try_from(fd) {
            // SAFETY: a new descriptor that nothing else owns.
            Ok(fd) if fd >= 0 => unsafe { OwnedFd::from_raw_fd(fd) },
            _ => return Err(TrackError::Unsupported(io::Error::last_os_error())),
        };
        let mut api = ApiArg {
            api: UFFD_API,
            features: UFFD_FEATURE_WP_ASYNC,
            ioctls: 0,
        };
        // SAFETY: `api` has the layout of struct uffdio_api and outlives the call.
        let rc = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &mut api) };
        if rc != 0 {
            return Err(TrackError::Unsupported(io::Error::last_os_error()));
        }
        Ok(Self { fd })
    }

    /// Lets writes to `len` bytes at `address` be followed; a mapping put there later is not. Until its
    /// pages are marked they all count as written.
    pub fn follow(&self, address: u64, len: u64) -> Result<(), TrackError> {
        let mut arg = RegisterArg {
            start: address,
            len,
            mode: UFFDIO_REGISTER_MODE_WP,
            ioctls: 0,
        };
        // SAFETY: `arg` has the layout of struct uffdio_register and outlives the call. Asynchronous
        // write protection changes neither the content of memory nor makes a thread wait.
        let rc = unsafe { libc::ioctl(self.fd.as_raw_fd(), UFFDIO_REGISTER, &mut arg) };
        if rc == 0 {
            Ok(())
        } else {
            Err(TrackError::Register(io::Error::last_os_error()))
        }
    }
}
