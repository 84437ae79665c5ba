//! A place for what is being written.

use std::fs::File;
use std::path::{Path, PathBuf};

use forkd_types::path_error;

use crate::error::StoreError;

/// A directory that nobody sees; it goes away with this value unless it was renamed into place.
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

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A new file in it, open for reading and writing.
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

    /// Leaves it alone: it was renamed, or the process is as good as dead.
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
