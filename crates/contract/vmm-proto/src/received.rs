//! The descriptors that came with a command.
//!
//! A command names a descriptor by its place. Each can be taken once; the rest are closed with [`Fds`].

use std::fs::File;
use std::os::fd::OwnedFd;

use crate::FdIndex;
use thiserror::Error;

/// A message names a descriptor that is not there.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FdError {
    /// Fewer came along.
    #[error("the message names descriptor {index}, but {count} came with it")]
    Missing {
        index: u8,
        /// How many there are.
        count: usize,
    },
    #[error("the message names descriptor {index} twice")]
    Taken { index: u8 },
}

/// Descriptors, each to be taken once.
#[derive(Debug, Default)]
pub struct Fds(Vec<Option<OwnedFd>>);

impl Fds {
    /// Takes over what came with a message.
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Self(fds.into_iter().map(Some).collect())
    }

    pub fn take(&mut self, FdIndex(index): FdIndex) -> Result<OwnedFd, FdError> {
        let count = self.0.len();
        self.0
            .get_mut(usize::from(index))
            .ok_or(FdError::Missing { index, count })?
            .take()
            .ok_or(FdError::Taken { index })
    }

    /// Takes one as a file.
    pub fn file(&mut self, index: FdIndex) -> Result<File, FdError> {
        self.take(index).map(File::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_can_be_taken_once() {
        let mut fds = Fds::new(vec![tempfile::tempfile().unwrap().into()]);
        assert!(fds.take(FdIndex(0)).is_ok());
        assert_eq!(
            fds.take(FdIndex(0)).err(),
            Some(FdError::Taken { index: 0 })
        );
        let missing = FdError::Missing { index: 1, count: 1 };
        assert_eq!(fds.take(FdIndex(1)).err(), Some(missing));
    }
}
