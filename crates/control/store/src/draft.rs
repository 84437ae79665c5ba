//! One file on its way into the store.

use std::fs::File;
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
    /// A name that no file has.
    fn at(staging: &Path) -> Self {
        let name = format!("{:016x}.draft", rand::random::<u64>());
        Self {
            path: staging.join(name),
            keep: false,
        }
    }

    /// A new empty file, open for writing.
    pub fn create(staging: &Path) -> Result<(Self, File), StoreError> {
        let draft = Self::at(staging);
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&draft.path)
            .map_err(path_error("create", &draft.path))?;
        Ok((draft, file))
    }

    /// A second name of an existing file.
    pub fn link(staging: &Path, path: &Path) -> Result<Self, StoreError> {
        let draft = Self::at(staging);
        std::fs::hard_link(path, &draft.path).map_err(path_error("link", path))?;
        Ok(draft)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Leaves the file alone: it has another name now, or the process is as good as dead.
    pub fn forget(mut self) {
        self.keep = true;
    }
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
