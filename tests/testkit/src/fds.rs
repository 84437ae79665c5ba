//! Descriptors on their way to a VMM.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkd_vmm_proto::FdIndex;

/// Descriptors in the order a message names them.
#[derive(Debug, Default)]
pub struct Fds(Vec<OwnedFd>);

impl Fds {
    /// Adds one and gives the index a message uses for it.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> FdIndex {
        self.0.push(fd.into());
        FdIndex(u8::try_from(self.0.len() - 1).expect("a message has at most 64 descriptors"))
    }

    /// All of them, to be sent.
    pub fn borrow(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd).collect()
    }
}
