//! The jail of a VMM: empty namespaces, no rights, no paths.
//!
//! ```text
//!   forkd-spawn, once        enter_user_namespace   only where it may not make namespaces itself
//!                            Void::make             mount (empty, read-only root), network, IPC, host name
//!   forkd-spawn, per shell   start_as_init          the VMM is process ID 1 of its own namespace
//!   forkd-vmm, per shell     enter                  void, user ID, capabilities, no_new_privs, Landlock
//! ```
//!
//! A shell enters its jail while it is made for the pool, so the jail costs a fork nothing. [`enter`] fails if one of
//! the walls that it was asked for cannot be put up: a VMM is never in less than the jail that was announced.

mod build;
mod landlock;
mod rights;
mod service;
mod start;
mod user;
mod void;

pub use build::Prison;
pub use landlock::{Confined, confine_paths, deny_paths, deny_paths_but, landlock_works};
pub use rights::{close_other_descriptors, drop_rights, is_open, keep_rights};
pub use service::{ServiceWalls, confine_service, service_user};
pub use start::{StartedProcess, end_with_parent, start_as_init};
pub use user::{UserRange, enter_user_namespace};
pub use void::{NAMESPACES, Void, make_namespace};

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::process::{Gid, Signal, Uid};
use thiserror::Error;

/// A step of the jail that the kernel refused.
#[derive(Debug, Error)]
#[error("{step}")]
pub struct JailError {
    /// The step, as a sentence without a full stop.
    pub step: &'static str,
    #[source]
    pub source: io::Error,
}

impl JailError {
    fn at<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self {
            step,
            source: source.into(),
        }
    }
}

/// The walls that a VMM puts up around itself.
#[derive(Debug)]
pub struct Cell {
    /// The namespaces of the void, in the order of [`NAMESPACES`]; empty where there is no void.
    pub namespaces: Vec<OwnedFd>,
    /// The user and group ID to take; `None` keeps those of the parent.
    pub user: Option<u32>,
    /// Deny every path.
    pub landlock: bool,
}

/// The needs of a VMM of another project inside its jail: such a program opens paths by itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Openings<'a> {
    /// Groups besides that of the user, for devices that belong to a group.
    pub groups: &'a [u32],
    /// Paths that Landlock lets the VMM read and run.
    pub readable: &'a [&'a Path],
    /// Paths below which Landlock lets the VMM do anything.
    pub writable: &'a [&'a Path],
}

/// Puts the calling process into a jail without openings, in an empty working directory. See [`enter_with`].
pub fn enter(cell: Cell) -> Result<(), JailError> {
    enter_namespaces(&cell)?;
    rustix::process::chdir("/").map_err(JailError::at("cannot leave the working directory"))?;
    give_up(&cell, Openings::default())
}

/// Puts the calling process into its jail, and keeps its working directory. The process must have one thread: credentials
/// belong to threads, and threads that exist already would keep theirs.
pub fn enter_with(cell: Cell, openings: Openings<'_>) -> Result<(), JailError> {
    enter_namespaces(&cell)?;
    give_up(&cell, openings)
}

fn enter_namespaces(cell: &Cell) -> Result<(), JailError> {
    for namespace in &cell.namespaces {
        rustix::thread::move_into_link_name_space(namespace.as_fd(), None)
            .map_err(JailError::at("cannot enter a namespace of the void"))?;
    }
    Ok(())
}

fn give_up(cell: &Cell, openings: Openings<'_>) -> Result<(), JailError> {
    rights::empty_bounding_set()?;
    if let Some(number) = cell.user {
        become_user(number, openings.groups)?;
    }
    // After `setns` into a user namespace a change of the user ID does not clear the capabilities.
    drop_rights()?;
    if cell.landlock {
        deny_paths_but(openings.readable, openings.writable)?;
    }
    // A change of credentials clears the death signal. A parent that ended meanwhile has closed the control socket.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(JailError::at("cannot ask to end with the parent"))
}

fn become_user(number: u32, groups: &[u32]) -> Result<(), JailError> {
    let (user, group) = (Uid::from_raw(number), Gid::from_raw(number));
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    rustix::thread::set_thread_groups(&groups)
        .map_err(JailError::at("cannot leave the groups of the parent"))?;
    rustix::thread::set_thread_res_gid(group, group, group)
        .map_err(JailError::at("cannot take a group ID"))?;
    rustix::thread::set_thread_res_uid(user, user, user)
        .map_err(JailError::at("cannot take a user ID"))
}
