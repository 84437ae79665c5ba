//! Writes that survive a power cut.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use forkd_types::{PathError, path_error};
use rustix::fs::{CWD, RenameFlags, renameat_with};

/// Makes the names in a directory durable.
pub fn sync_dir(path: &Path) -> Result<(), PathError> {
    File::open(path)
        .and_then(|dir| dir.sync_all())
        .map_err(path_error("sync", path))
}

/// Writes a new file and makes its content durable; its name is not until the directory is synced.
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<(), PathError> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .map_err(path_error("write", path))
}

/// Renames, and fails when the target exists, in one step.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

/// Creates a directory and its parents.
pub fn make_dirs(path: &Path) -> Result<(), PathError> {
    std::fs::create_dir_all(path).map_err(path_error("create", path))
}
