//! The confinement of a program that serves every sandbox of a host and keeps the network of the host.

use std::path::Path;

use rustix::thread::{CapabilitySet, capabilities};

use super::build::reason;
use super::landlock::deny_all_but_reading;
use super::{JailError, become_user, drop_rights, rights};

/// Enough to become another user.
const USER_RIGHTS: CapabilitySet = CapabilitySet::SETUID.union(CapabilitySet::SETGID);

/// The walls around a program. A wall that does not stand has its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceWalls {
    /// The user ID of the program is its own.
    pub user: Result<(), String>,
    pub landlock: Result<(), String>,
}

/// Confines the calling process, which must have one thread.
///
/// The process gets the user ID `user` if it may change its own, loses every capability and can get none. Landlock
/// denies it every path but files below `readable`, ports to listen on, signals to others and abstract sockets. It
/// may still connect to any address. Capabilities that cannot be given up are an error; the other walls are optional.
pub fn confine_service(user: u32, readable: &[&Path]) -> Result<ServiceWalls, JailError> {
    let rights = capabilities(None).map_err(JailError::at("cannot read capabilities"))?;
    rights::empty_bounding_set()?;
    let user = match rights.effective.contains(USER_RIGHTS) {
        true => become_user(user, &[]).map_err(|error| reason(&error)),
        false => Err("the program may not change its user ID: it does not run as root".to_owned()),
    };
    // In a user namespace a change of the user ID does not clear the capabilities.
    drop_rights()?;
    let landlock = deny_all_but_reading(readable)
        .map(drop)
        .map_err(|error| reason(&error));
    Ok(ServiceWalls { user, landlock })
}

/// How many programs of one kind have a user ID of their own on one host.
const USERS: u64 = 1024;

/// A user ID that another program of this kind most likely does not have: `first` and a hash (FNV-1a) of the path of the
/// socket that the program listens on. Distributions and systemd give out none of the IDs from 1,899,990,000 on.
pub fn service_user(first: u32, socket: &Path) -> u32 {
    let bytes = socket.as_os_str().as_encoded_bytes();
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    first + u32::try_from(hash % USERS).unwrap_or(0)
}
