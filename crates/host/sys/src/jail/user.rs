//! A user namespace for `forkd-spawn`, where it has no right to make the other namespaces.
//!
//! Inside it the program has every capability over the namespaces that it makes, and none over the host.

#![allow(unsafe_code)]

use std::fs;
use std::io;

use rustix::process::{getegid, geteuid, getpid};
use rustix::thread::UnshareFlags;

use super::JailError;
use crate::fork::ChildWriter;

/// User IDs of the host that VMMs may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserRange {
    /// The first user ID on the host.
    pub first: u32,
    /// The number of user IDs.
    pub count: u32,
}

/// Moves this process, which must have one thread, into a user namespace of its own.
///
/// With a range, user ID 0 stays 0 and the range appears from 1 on; this needs `CAP_SETUID` and `CAP_SETGID`. Without
/// one, the caller's own user and group are the only ones.
pub fn enter_user_namespace(range: Option<UserRange>) -> Result<(), JailError> {
    match range {
        Some(range) => with_range(range),
        None => with_own_user(),
    }
}

fn unshare() -> Result<(), JailError> {
    // SAFETY: no descriptor table is unshared, which is the only danger of this call.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }
        .map_err(JailError::at("cannot make a user namespace"))
}

fn with_own_user() -> Result<(), JailError> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    unshare()?;
    let map = |file: &str, content: String| fs::write(format!("/proc/self/{file}"), content);
    // Without this the kernel lets no plain user map a group.
    map("setgroups", "deny".to_owned())
        .and_then(|()| map("uid_map", format!("{user} {user} 1\n")))
        .and_then(|()| map("gid_map", format!("{group} {group} 1\n")))
        .map_err(JailError::at("cannot map the user of this process"))
}

/// A process that stayed outside writes the map: after `unshare` this one has no right over its parent namespace.
fn with_range(range: UserRange) -> Result<(), JailError> {
    let failed = JailError::at::<io::Error>;
    let own = getpid().as_raw_pid();
    let text = format!("0 0 1\n1 {} {}\n", range.first, range.count);
    let (hold, release) = io::pipe().map_err(failed("cannot make a pipe"))?;
    let paths = [c"uid_map", c"gid_map"];
    let folder =
        fs::File::open(format!("/proc/{own}")).map_err(failed("cannot open /proc/self"))?;
    let outside = ChildWriter::fork(|| {
        let mut byte = [0];
        // Nothing here may allocate: see `ChildWriter`.
        if !matches!(rustix::io::read(&hold, &mut byte), Ok(1)) {
            return 1;
        }
        for path in paths {
            let flags = rustix::fs::OFlags::WRONLY;
            let mode = rustix::fs::Mode::empty();
            let written = rustix::fs::openat(&folder, path, flags, mode)
                .and_then(|file| rustix::io::write(file, text.as_bytes()));
            if written != Ok(text.len()) {
                return 2;
            }
        }
        0
    })
    .map_err(|error| failed("cannot start the process that maps users")(io::Error::other(error)))?;
    unshare()?;
    rustix::io::write(&release, &[1]).map_err(JailError::at("cannot map users"))?;
    match outside.wait() {
        Ok(0) => Ok(()),
        Ok(_) => Err(failed("cannot map users")(
            io::ErrorKind::PermissionDenied.into(),
        )),
        Err(error) => Err(failed("cannot map users")(io::Error::other(error))),
    }
}
