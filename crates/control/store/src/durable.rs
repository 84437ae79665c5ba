//! Writes that survive a power cut.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use forkd_types::{PathError, path_error};
use parking_lot::Mutex;
use rustix::fs::{CWD, RenameFlags, renameat_with};

/// Makes everything durable that was written to the file system of the store, in one call.
///
/// The kernel reports a failed write-back once per open file. So one descriptor is used for all calls, and a failure
/// counts for everything that was written before it: [`Syncer::epoch`] is noted when something is written, and
/// [`Syncer::sync`] fails for everything of an earlier epoch.
#[derive(Debug)]
pub struct Syncer {
    root: File,
    failures: AtomicU64,
    turn: Mutex<()>,
    #[cfg(test)]
    pub calls: AtomicU64,
    #[cfg(test)]
    pub fails: std::sync::atomic::AtomicBool,
}

impl Syncer {
    pub fn open(root: &Path) -> Result<Self, PathError> {
        Ok(Self {
            root: File::open(root).map_err(path_error("open", root))?,
            failures: AtomicU64::new(0),
            turn: Mutex::default(),
            #[cfg(test)]
            calls: AtomicU64::new(0),
            #[cfg(test)]
            fails: Default::default(),
        })
    }

    /// A number that grows with each failure.
    pub fn epoch(&self) -> u64 {
        self.failures.load(Ordering::Acquire)
    }

    /// Makes durable what was written in this epoch.
    pub fn sync(&self, epoch: u64) -> io::Result<()> {
        let _turn = self.turn.lock();
        if epoch != self.epoch() {
            return Err(io::Error::other(
                "the disk failed after this was written: write it again",
            ));
        }
        self.sync_all().inspect_err(|_| {
            self.failures.fetch_add(1, Ordering::Release);
        })
    }

    fn sync_all(&self) -> io::Result<()> {
        #[cfg(test)]
        {
            self.calls.fetch_add(1, Ordering::Relaxed);
            if self.fails.load(Ordering::Relaxed) {
                return Err(io::Error::other("bad disk"));
            }
        }
        Ok(rustix::fs::syncfs(&self.root)?)
    }
}

/// Makes the names in a directory durable.
pub fn sync_dir(path: &Path) -> Result<(), PathError> {
    File::open(path)
        .and_then(|dir| dir.sync_all())
        .map_err(path_error("sync", path))
}

/// Writes a new file. Nothing is durable yet.
pub fn write_unsynced(path: &Path, bytes: &[u8]) -> Result<(), PathError> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .and_then(|mut file| file.write_all(bytes))
        .map_err(path_error("write", path))
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
