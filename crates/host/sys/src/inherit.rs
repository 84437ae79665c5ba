//! Descriptors that the parent process left open.
//!
//! A descriptor is named by its number on the command line. [`inherited_fd`] takes each number at most once, so
//! two owners of one descriptor cannot exist.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Mutex;

static TAKEN: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// Takes over a descriptor by number and closes it on exec. Each number can be taken once. Of the standard
/// streams only the input can be had, as another descriptor for the same thing: a parent that has a single
/// one to leave puts it there.
pub fn inherited_fd(number: RawFd) -> io::Result<OwnedFd> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
    if number == 0 {
        return io::stdin().as_fd().try_clone_to_owned();
    }
    if number <= 2 {
        return Err(invalid());
    }
    let mut taken = TAKEN.lock().map_err(|_| invalid())?;
    if taken.contains(&number) {
        return Err(invalid());
    }
    // SAFETY: the call below fails if nothing is open under this number; nothing else is done with it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC)?;
    taken.push(number);
    // SAFETY: the descriptor is open, was left by the parent for us, and is taken only once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

    use super::*;

    #[test]
    fn a_number_can_be_taken_once_and_only_if_open() {
        let number = tempfile::tempfile().unwrap().into_raw_fd();
        assert!(inherited_fd(number).is_ok());
        assert!(inherited_fd(number).is_err());
        assert!(inherited_fd(1).is_err());
        assert!(inherited_fd(987_654).is_err());
        assert!(inherited_fd(-1).is_err());
    }
}
