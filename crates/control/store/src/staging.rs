//! Directories for files that are being written.

use std::fs::File;
use std::path::{Path, PathBuf};

use forkd_types::path_error;

use crate::error::StoreError;

/// A private directory, removed with this value unless it was renamed into place.
#[derive(Debug)]
pub struct Staging {
    path: PathBuf,
    keep: bool,
}

impl Staging {
    pub(crate) fn new(parent: &Path) -> Result<Self, StoreError> {
        let path = parent.join(format!("{:016x}", rand::random::<u64>()));
        std::fs::create_dir(&path).map_err(path_error("create", &path))?;
        Ok(Self { path, keep: false })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of a file in the directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Creates a file in the directory, open for reading and writing.
    pub fn create(&self, name: &str) -> Result<File, StoreError> {
        let path = self.file(name);
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(path_error("create", path))?;
        Ok(file)
    }

    /// Keeps the directory: it was renamed, or a test simulates the death of the process.
    pub(crate) fn forget(mut self) {
        self.keep = true;
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.keep
            && let Err(error) = std::fs::remove_dir_all(&self.path)
        {
            // What stays is removed at the next start.
            tracing::warn!(path = %self.path.display(), %error, "staging directory not removed");
        }
    }
}
