//! The void: namespaces with nothing in them, made once and shared by all VMMs of a `forkd-spawn`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

use super::JailError;
use super::start::try_new_pids;

/// The namespaces of the void. The mount namespace is the last one to enter: it takes `/` away.
pub const NAMESPACES: [&str; 4] = ["net", "ipc", "uts", "mnt"];

/// The void. It lives as long as its descriptors.
#[derive(Debug)]
pub struct Void {
    namespaces: Vec<OwnedFd>,
}

impl Void {
    /// Makes the void, in a thread that ends with it. The thread alone is in the new namespaces.
    pub fn make() -> Result<Self, JailError> {
        let failed = |error| JailError::at::<io::Error>("cannot make the void")(error);
        let namespaces = std::thread::spawn(empty_namespaces)
            .join()
            .unwrap_or_else(|_| Err(failed(io::Error::other("its thread panicked"))))?;
        // Tried once, so that a refusal shows here and not with the first VMM.
        try_new_pids().map_err(JailError::at("cannot make a process namespace"))?;
        Ok(Self { namespaces })
    }

    /// The namespaces in the order of [`NAMESPACES`].
    pub fn namespaces(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.namespaces.iter().map(AsFd::as_fd)
    }
}

/// Tries to make a user namespace, for tests of a jail.
pub fn make_namespace() -> rustix::io::Result<()> {
    // SAFETY: no descriptor table is unshared, which is the only danger of this call.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) }
}

/// Moves the calling thread into new namespaces, empties them, and gives descriptors of them.
fn empty_namespaces() -> Result<Vec<OwnedFd>, JailError> {
    let flags = UnshareFlags::FS
        | UnshareFlags::NEWNS
        | UnshareFlags::NEWNET
        | UnshareFlags::NEWIPC
        | UnshareFlags::NEWUTS;
    // SAFETY: no descriptor table is unshared, which is the only danger of this call.
    unsafe { rustix::thread::unshare_unsafe(flags) }
        .map_err(JailError::at("cannot make namespaces"))?;
    let opened: io::Result<Vec<OwnedFd>> = NAMESPACES
        .iter()
        .map(|name| Ok(File::open(format!("/proc/thread-self/ns/{name}"))?.into()))
        .collect();
    let opened = opened.map_err(JailError::at("cannot open the new namespaces"))?;
    rustix::system::sethostname(b"void").map_err(JailError::at("cannot name the void"))?;
    empty_root()?;
    Ok(opened)
}

/// Replaces the root by an empty, read-only file system.
fn empty_root() -> Result<(), JailError> {
    // Nothing that is mounted here may reach the host.
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)
        .map_err(JailError::at("cannot make mounts private"))?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    // Any folder will do; this one exists wherever the page map could be opened.
    rustix::mount::mount(
        "void",
        "/proc",
        "tmpfs",
        flags,
        c"size=4k,nr_inodes=1,mode=0555",
    )
    .map_err(JailError::at("cannot mount an empty root"))?;
    rustix::process::chdir("/proc").map_err(JailError::at("cannot enter the empty root"))?;
    rustix::process::pivot_root(".", ".").map_err(JailError::at("cannot exchange the root"))?;
    // The old root lies on top of the new one now.
    rustix::mount::unmount(".", UnmountFlags::DETACH)
        .map_err(JailError::at("cannot detach the old root"))?;
    rustix::process::chdir("/").map_err(JailError::at("cannot enter the empty root"))
}
