//! Which walls this process can put up around the VMMs that it starts.

use std::error::Error;

use rustix::thread::{CapabilitySet, capabilities};

use super::rights::pass_rights_on;
use super::{JailError, UserRange, Void, enter_user_namespace, landlock_works};

/// The walls around the VMMs of one host. A wall that does not stand has its reason.
#[derive(Debug)]
pub struct Prison {
    pub void: Result<Void, String>,
    /// User IDs for VMMs, in the numbers of the namespace that this process is in.
    pub users: Result<UserRange, String>,
    pub landlock: Result<(), String>,
}

/// Enough to make namespaces and to enter them.
const NAMESPACE_RIGHTS: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::SETPCAP);
/// Enough to become another user.
const USER_RIGHTS: CapabilitySet = CapabilitySet::SETUID.union(CapabilitySet::SETGID);

impl Prison {
    /// Puts up what can be put up. `range` are the user IDs of the host that VMMs may have.
    ///
    /// | this process | namespaces | user IDs |
    /// |---|---|---|
    /// | root | made directly | the range |
    /// | root without `CAP_SYS_ADMIN` | in a user namespace | the range, mapped |
    /// | a plain user | in a user namespace | none |
    ///
    /// The process must have one thread.
    pub fn build(range: UserRange) -> Self {
        let rights = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
        let landlock = landlock_works().map(drop).map_err(|error| reason(&error));
        let changes_users = rights.contains(USER_RIGHTS);
        let users = if changes_users {
            Ok(range)
        } else {
            Err("forkd-spawn may not change the user ID: it does not run as root".to_owned())
        };
        if rights.contains(NAMESPACE_RIGHTS) {
            let void = Void::make().map_err(|error| reason(&error));
            return Self {
                void,
                users,
                landlock,
            };
        }
        let inside = enter_user_namespace(changes_users.then_some(range)).and_then(|()| {
            if changes_users {
                return Ok(());
            }
            pass_rights_on(NAMESPACE_RIGHTS)
        });
        match inside {
            Ok(()) => Self {
                void: Void::make().map_err(|error| reason(&error)),
                // The range appears from 1 on.
                users: users.map(|range| UserRange { first: 1, ..range }),
                landlock,
            },
            Err(error) => Self {
                void: Err(reason(&error)),
                users,
                landlock,
            },
        }
    }
}

/// An error and its causes in one line.
pub(super) fn reason(error: &JailError) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
