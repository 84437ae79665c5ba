//! Collects the descriptors of a message to a VMM, and their indexes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkd_vmm_proto::FdIndex;

/// Descriptors in the order in which the message refers to them.
#[derive(Debug, Default)]
pub struct Fds(Vec<OwnedFd>);

impl Fds {
    /// Adds a descriptor and returns its index.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> FdIndex {
        self.0.push(fd.into());
        FdIndex(u8::try_from(self.0.len() - 1).expect("a message has at most 64 descriptors"))
    }

    /// All descriptors, to be sent.
    pub fn borrow(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd).collect()
    }
}
