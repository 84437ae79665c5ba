//! Finds the programs of this build on the host.
//!
//! `FORKD_PROGRAMS` names another folder than that of the running program. [`NAMES`] lists the programs that
//! are copied into a machine.

use std::env;
use std::path::{Path, PathBuf};

use crate::dirs::named;

/// The programs that are copied into a machine.
pub const NAMES: [&str; 10] = [
    "forkd",
    "forkd-controller",
    "forkd-vmm",
    "forkd-fc",
    "forkd-spawn",
    "forkd-net",
    "forkd-broker",
    "forkd-image",
    "forkd-bench",
    "forkd-agent",
];

/// The folder with the programs of this build: `FORKD_PROGRAMS`, otherwise the folder of the running program.
#[must_use]
pub fn folder() -> Option<PathBuf> {
    match named("FORKD_PROGRAMS") {
        Some(folder) => Some(folder),
        None => env::current_exe().ok()?.parent().map(Path::to_owned),
    }
}

/// Looks for a program beside the running one, then in `PATH`.
#[must_use]
pub fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    folder()
        .into_iter()
        .chain(env::split_paths(&path))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}
