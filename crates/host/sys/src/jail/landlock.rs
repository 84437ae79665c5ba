//! Landlock: a process that denies itself paths.
//!
//! Files that are open already, and files that arrive as descriptors, stay usable. Kernels differ in the rights they
//! know; each handles those that it knows.

use std::io;
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError,
    RulesetStatus, Scope,
};

use super::JailError;

/// The newest set of rights that is asked for.
const NEWEST: ABI = ABI::V6;

/// How much of a confinement the kernel enforces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Confined {
    /// Every right that this program knows.
    Fully,
    /// The rights that the kernel knows.
    Partly,
}

/// Whether the kernel has Landlock, tried in a thread of its own: a thread that has restricted itself ends with it.
pub fn landlock_works() -> Result<Confined, JailError> {
    let tried = std::thread::spawn(deny_paths).join();
    tried.unwrap_or_else(|_| {
        Err(JailError::at("cannot try Landlock")(io::Error::other(
            "the attempt panicked",
        )))
    })
}

/// Denies the calling thread, and those it starts, every path, every TCP port, and signals to others.
pub fn deny_paths() -> Result<Confined, JailError> {
    deny_paths_but(&[], &[])
}

/// As [`deny_paths`], but the thread may read and run what is below `readable`, and do anything below `writable`. A path
/// that does not exist is left out.
pub fn deny_paths_but(readable: &[&Path], writable: &[&Path]) -> Result<Confined, JailError> {
    judge(everything().and_then(|ruleset| restrict(ruleset, readable, writable)))
}

/// Denies the calling thread, and those it starts, every path but these: it may read and run what is below `readable`,
/// and do anything below `writable`. A path that does not exist is left out. Signals and the network stay free.
pub fn confine_paths(readable: &[&Path], writable: &[&Path]) -> Result<Confined, JailError> {
    judge(files_only().and_then(|ruleset| restrict(ruleset, readable, writable)))
}

/// Denies the calling thread, and those it starts, every path, every TCP port to listen on, signals to others and
/// abstract sockets. It may read files below `readable` and connect to any address.
pub(super) fn deny_all_but_reading(readable: &[&Path]) -> Result<Confined, JailError> {
    let read: BitFlags<AccessFs> = AccessFs::ReadFile.into();
    let restricted = no_listening()
        .and_then(|ruleset| allow(ruleset, readable, read))
        .and_then(RulesetCreated::restrict_self);
    judge(restricted)
}

fn no_listening() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::from_all(NEWEST))?
        .create()
}

fn restrict(
    mut ruleset: RulesetCreated,
    readable: &[&Path],
    writable: &[&Path],
) -> Result<RestrictionStatus, RulesetError> {
    let read = AccessFs::from_read(NEWEST);
    for (paths, access) in [(readable, read), (writable, AccessFs::from_all(NEWEST))] {
        ruleset = allow(ruleset, paths, access)?;
    }
    ruleset.restrict_self()
}

fn allow(
    mut ruleset: RulesetCreated,
    paths: &[&Path],
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    for path in paths {
        let Ok(opened) = PathFd::new(path) else {
            continue;
        };
        // Rights on a folder are no rights on a file: the crate leaves out what does not apply.
        ruleset = ruleset.add_rule(PathBeneath::new(opened, access))?;
    }
    Ok(ruleset)
}

fn files_only() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .create()
}

fn everything() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()
}

fn judge(status: Result<RestrictionStatus, RulesetError>) -> Result<Confined, JailError> {
    let failed = |error: io::Error| JailError {
        step: "cannot deny paths with Landlock",
        source: error,
    };
    match status
        .map_err(|error| failed(io::Error::other(error)))?
        .ruleset
    {
        RulesetStatus::FullyEnforced => Ok(Confined::Fully),
        RulesetStatus::PartiallyEnforced => Ok(Confined::Partly),
        RulesetStatus::NotEnforced => Err(failed(io::Error::other(
            "this kernel has no Landlock, or it is switched off (lsm= on the kernel command line)",
        ))),
    }
}
