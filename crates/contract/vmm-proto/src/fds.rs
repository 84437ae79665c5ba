//! The descriptors of a message, on their way out.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use thiserror::Error;

use crate::{FdIndex, MAX_FDS};

/// Collects the descriptors of one message and gives each its place. `F` is [`BorrowedFd`] or [`OwnedFd`].
#[derive(Debug)]
pub struct FdList<F> {
    fds: Vec<F>,
}

/// A message has more descriptors than a packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the message has {count} descriptors, {MAX_FDS} is the limit")]
pub struct TooManyFds {
    /// The number of descriptors.
    pub count: usize,
}

impl<F> Default for FdList<F> {
    fn default() -> Self {
        Self { fds: Vec::new() }
    }
}

impl<'a> FdList<BorrowedFd<'a>> {
    /// Adds a descriptor.
    pub fn push(&mut self, fd: &'a impl AsFd) -> FdIndex {
        self.place(fd.as_fd())
    }

    /// The descriptors so far.
    pub fn as_slice(&self) -> &[BorrowedFd<'a>] {
        &self.fds
    }

    /// All descriptors, if they fit into one packet.
    pub fn finish(self) -> Result<Vec<BorrowedFd<'a>>, TooManyFds> {
        match self.fds.len() {
            count if count > MAX_FDS => Err(TooManyFds { count }),
            _ => Ok(self.fds),
        }
    }
}

impl FdList<OwnedFd> {
    /// Adds a descriptor and keeps it open.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> FdIndex {
        self.place(fd.into())
    }
}

impl<F: AsFd> FdList<F> {
    /// All descriptors, to be sent.
    pub fn borrow(&self) -> Vec<BorrowedFd<'_>> {
        self.fds.iter().map(AsFd::as_fd).collect()
    }

    /// A place beyond the largest index is never sent: [`FdList::finish`] and the channel refuse such a message.
    fn place(&mut self, fd: F) -> FdIndex {
        self.fds.push(fd);
        FdIndex(u8::try_from(self.fds.len() - 1).unwrap_or(u8::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_descriptor_has_its_place_and_there_is_an_end_to_them() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut list = FdList::default();
        let places: Vec<u8> = (0..3).map(|_| list.push(&file).0).collect();
        assert_eq!(places, [0, 1, 2]);
        assert_eq!(list.finish().unwrap().len(), 3);
        let mut list = FdList::default();
        for _ in 0..=MAX_FDS {
            list.push(&file);
        }
        assert_eq!(
            list.finish().unwrap_err(),
            TooManyFds { count: MAX_FDS + 1 }
        );
    }
}
