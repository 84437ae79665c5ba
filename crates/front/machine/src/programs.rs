//! The programs of this build: where they are on the host.

use std::env;
use std::path::{Path, PathBuf};

use crate::dirs::named;

/// The programs that belong into a machine.
pub const NAMES: [&str; 7] = [
    "forkd",
    "forkd-controller",
    "forkd-vmm",
    "forkd-spawn",
    "forkd-image",
    "forkd-bench",
    "forkd-agent",
];

/// The folder with the programs of this build: the one `FORKD_PROGRAMS` names, else that of the
/// running program.
#[must_use]
pub fn folder() -> Option<PathBuf> {
    match named("FORKD_PROGRAMS") {
        Some(folder) => Some(folder),
        None => env::current_exe().ok()?.parent().map(Path::to_owned),
    }
}

/// A program of this build: beside the running one, else in `PATH`.
#[must_use]
pub fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    folder()
        .into_iter()
        .chain(env::split_paths(&path))
        .map(|folder| folder.join(name))
        .find(|candidate| candidate.is_file())
}
