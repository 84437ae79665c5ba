//! The jail of each VMM, as far as `forkd-spawn` makes it: namespaces and a user ID.
//!
//! The VMM enters it by itself when it is prepared (`forkd_sys::jail::enter`).

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::rc::Rc;

use forkd_sys::jail::{Prison, UserRange, confine_paths, keep_rights};
use forkd_vmm_proto::JailSpec;
use forkd_vmm_proto::spawn::{Wall, Walls};
use rustix::thread::CapabilitySet;

use crate::cgroup::group_number;
use crate::process::{Process, StartError};

/// User IDs that VMMs may have. Distributions and systemd give out none of them.
const FIRST_USER: u32 = 1_900_000_000;
/// The user IDs of one `forkd-spawn`.
const USERS: u32 = 1 << 16;
/// How many `forkd-spawn` of one host have user IDs of their own.
const SLICES: u32 = 1024;

/// Rights that `forkd-spawn` uses after its start: namespaces and user IDs of VMMs, their ends, page maps and limits.
const KEPT: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::SYS_RESOURCE)
    .union(CapabilitySet::DAC_OVERRIDE);

/// The walls around each VMM, and the user IDs that are in use.
#[derive(Debug)]
pub struct Jails {
    prison: Prison,
    used: Rc<RefCell<BTreeSet<u32>>>,
    next: u32,
}

/// The user ID of one VMM. It is free again when this is dropped.
#[derive(Debug)]
pub struct VmUser {
    number: u32,
    used: Rc<RefCell<BTreeSet<u32>>>,
}

impl Drop for VmUser {
    fn drop(&mut self) {
        self.used.borrow_mut().remove(&self.number);
    }
}

impl Jails {
    /// Puts up the walls for the VMMs of the `forkd-spawn` that listens on `socket`.
    pub fn build(socket: &Path) -> Self {
        let slice = (group_number(socket) % u64::from(SLICES)) as u32;
        Self::of(Prison::build(UserRange {
            first: FIRST_USER + slice * USERS,
            count: USERS - 1,
        }))
    }

    /// A report without any wall.
    #[cfg(test)]
    pub fn none(reason: &str) -> Self {
        Self::of(Prison {
            void: Err(reason.to_owned()),
            users: Err(reason.to_owned()),
            landlock: Err(reason.to_owned()),
        })
    }

    fn of(prison: Prison) -> Self {
        Self {
            prison,
            used: Rc::default(),
            next: 0,
        }
    }

    /// The walls that stand around every VMM.
    pub fn walls(&self) -> Walls {
        let all = [Wall::Namespaces, Wall::User, Wall::Landlock];
        all.into_iter()
            .filter(|wall| self.reason(*wall).is_none())
            .collect()
    }

    /// Why a wall does not stand.
    pub fn reason(&self, wall: Wall) -> Option<&str> {
        match wall {
            Wall::Namespaces => self.prison.void.as_ref().err(),
            Wall::User => self.prison.users.as_ref().err(),
            Wall::Landlock => self.prison.landlock.as_ref().err(),
            _ => None,
        }
        .map(String::as_str)
    }

    /// Starts a VMM, as process ID 1 of its own namespace where there is a void.
    pub fn start(&self, program: &Path, arguments: &[OsString]) -> Result<Process, StartError> {
        Process::start(program, arguments, self.prison.void.is_ok())
    }

    /// A user ID that no VMM has; `None` where VMMs have no user of their own, or all are taken.
    pub fn user(&mut self) -> Option<VmUser> {
        let range = *self.prison.users.as_ref().ok()?;
        for _ in 0..range.count {
            let number = range.first + self.next;
            self.next = (self.next + 1) % range.count;
            if self.used.borrow_mut().insert(number) {
                return Some(VmUser {
                    number,
                    used: Rc::clone(&self.used),
                });
            }
        }
        None
    }

    /// The jail of one VMM, and the namespaces that it enters; the sender of the descriptors fills in their indices.
    pub fn spec(&self, user: Option<&VmUser>) -> (JailSpec, Vec<BorrowedFd<'_>>) {
        let fds: Vec<_> = match &self.prison.void {
            Ok(void) => void.namespaces().collect(),
            Err(_) => Vec::new(),
        };
        let spec = JailSpec {
            namespaces: Vec::new(),
            user: user.map(|user| user.number),
            landlock: self.prison.landlock.is_ok(),
        };
        (spec, fds)
    }
}

/// Takes from `forkd-spawn` itself what it does not need: capabilities, and every path but its own. Answers what could not
/// be taken. To be called when the walls of VMMs stand: Landlock allows no mounts afterwards.
pub fn confine_this_program(programs: &[&Path], socket: &Path, writable: &[&Path]) -> Vec<String> {
    let mut failed = Vec::new();
    if let Err(error) = keep_rights(KEPT) {
        failed.push(format!("{error}: {}", error.source));
    }
    let readable = [
        "/usr",
        "/lib",
        "/lib64",
        "/etc/ld.so.cache",
        "/etc/ld.so.preload",
    ];
    let mut readable: Vec<&Path> = readable.iter().map(Path::new).collect();
    readable.extend(programs);
    let mut all: Vec<&Path> = ["/proc", "/dev/kvm", "/dev/null"]
        .iter()
        .map(Path::new)
        .collect();
    all.extend(writable);
    all.extend(socket.parent());
    if let Err(error) = confine_paths(&readable, &all) {
        failed.push(format!("{error}: {}", error.source));
    }
    failed
}
