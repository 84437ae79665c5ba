//! Capabilities, `no_new_privs`, and descriptors that a parent left open.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::RawFd;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
    set_no_new_privs,
};

use super::JailError;

/// Gives up every capability, also those that a new program could get.
pub fn drop_rights() -> Result<(), JailError> {
    clear_ambient_capability_set().map_err(JailError::at("cannot clear ambient capabilities"))?;
    keep_rights(CapabilitySet::empty())
}

/// Lets programs that this process starts keep `passed`. A program of a plain user would lose them: only root keeps
/// capabilities over `execve` by itself.
pub(super) fn pass_rights_on(passed: CapabilitySet) -> Result<(), JailError> {
    let failed = || JailError::at("cannot pass capabilities on");
    let have = capabilities(None).map_err(failed())?;
    let sets = CapabilitySets {
        inheritable: have.inheritable | passed,
        ..have
    };
    set_capabilities(None, sets).map_err(failed())?;
    for one in passed.iter() {
        configure_capability_in_ambient_set(one, true).map_err(failed())?;
    }
    Ok(())
}

/// Gives up every capability but `kept`, and any right that a new program would add.
pub fn keep_rights(kept: CapabilitySet) -> Result<(), JailError> {
    let have = capabilities(None).map_err(JailError::at("cannot read capabilities"))?;
    let left = CapabilitySets {
        effective: have.effective & kept,
        permitted: have.permitted & kept,
        inheritable: have.inheritable & kept,
    };
    set_capabilities(None, left).map_err(JailError::at("cannot give up capabilities"))?;
    set_no_new_privs(true).map_err(JailError::at("cannot set no_new_privs"))
}

/// Empties the bounding set where this process may do so. Without that right it also has no capability to lose, and
/// `no_new_privs` keeps it from getting one.
pub(super) fn empty_bounding_set() -> Result<(), JailError> {
    for number in 0..64 {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            Ok(()) => {}
            // The kernel knows no capability of this number; the numbers have no gaps.
            Err(Errno::INVAL) => break,
            Err(Errno::PERM) => return Ok(()),
            Err(error) => return Err(JailError::at("cannot empty the bounding set")(error)),
        }
    }
    Ok(())
}

/// Whether a descriptor of this number is open.
pub fn is_open(number: RawFd) -> bool {
    // SAFETY: a system call without pointers that changes nothing.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

/// Closes every descriptor but the standard streams and `kept`. For the start of a program, before it has opened any:
/// what a parent left open by mistake must not be within the reach of a guest.
pub fn close_other_descriptors(kept: RawFd) -> io::Result<()> {
    let close = |first: u32, last: u32| {
        // SAFETY: the program has opened nothing yet, so no owner of a descriptor loses it.
        let rc = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        match rc {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let kept = u32::try_from(kept).unwrap_or(0);
    if kept < 3 {
        return close(3, u32::MAX);
    }
    if kept > 3 {
        close(3, kept - 1)?;
    }
    close(kept + 1, u32::MAX)
}
