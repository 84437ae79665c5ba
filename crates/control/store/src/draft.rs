//! One file on its way into the store.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use forkd_types::path_error;

use crate::error::StoreError;

/// A file in the staging directory, removed with this value unless it was renamed into place.
#[derive(Debug)]
pub struct Draft {
    path: PathBuf,
    keep: bool,
}

impl Draft {
    /// A new empty file, open for writing.
    pub fn create(staging: &Path) -> Result<(Self, File), StoreError> {
        let path = new_path(staging);
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(path_error("create", &path))?;
        Ok((Self { path, keep: false }, file))
    }

    /// A second name of an existing file.
    pub fn link(staging: &Path, path: &Path) -> Result<Self, StoreError> {
        let name = new_path(staging);
        std::fs::hard_link(path, &name).map_err(path_error("link", path))?;
        Ok(Self {
            path: name,
            keep: false,
        })
    }

    /// An existing file, moved here to be removed. A name without a file is taken as removed.
    pub fn take(staging: &Path, path: &Path) -> Result<Self, StoreError> {
        let name = new_path(staging);
        let keep = match std::fs::rename(path, &name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            other => other.map(|()| false).map_err(path_error("remove", path))?,
        };
        Ok(Self { path: name, keep })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the file alone: it has another name now, or the process is as good as dead.
    pub fn forget(mut self) {
        self.keep = true;
    }
}

/// A name that no file has.
fn new_path(staging: &Path) -> PathBuf {
    staging.join(format!("{:016x}.draft", rand::random::<u64>()))
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.keep
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            // The next start of the daemon empties the staging directory.
            tracing::warn!(path = %self.path.display(), %error, "draft not removed");
        }
    }
}
