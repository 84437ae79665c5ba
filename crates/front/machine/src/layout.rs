//! Paths of a machine's files.
//!
//! All files lie in one directory per machine that only its owner can enter. The lock file lies beside that
//! directory, because the directory is removed while the lock is held.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::dirs::Dirs;
use crate::error::{MachineError, file};
use crate::name::MachineName;

/// The files of one machine.
#[derive(Debug, Clone)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(crate) fn new(dirs: &Dirs, name: &MachineName) -> Self {
        Self {
            root: dirs.state.join("machine").join(name.as_str()),
        }
    }

    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Lock for start, stop and removal. The file lies beside the directory, so that removing the directory
    /// does not remove the lock while other processes wait for it.
    pub(crate) fn lock(&self) -> PathBuf {
        self.root.with_extension("lock")
    }

    /// The record of the running machine.
    pub(crate) fn record(&self) -> PathBuf {
        self.root.join("machine.json")
    }

    /// QEMU's pid file. QEMU writes it before forkd writes the record.
    pub(crate) fn pid_file(&self) -> PathBuf {
        self.root.join("qemu.pid")
    }

    pub(crate) fn qmp(&self) -> PathBuf {
        self.root.join("qmp.sock")
    }

    /// Output of the kernel and the agent.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.root.join("console.log")
    }

    /// QEMU's own error messages.
    pub(crate) fn qemu_log(&self) -> PathBuf {
        self.root.join("qemu.log")
    }

    /// The image's initramfs with the token appended.
    pub(crate) fn initrd(&self) -> PathBuf {
        self.root.join("initrd")
    }

    /// The token that the agent demands.
    pub(crate) fn token(&self) -> PathBuf {
        self.root.join("token")
    }

    pub(crate) fn data_disk(&self) -> PathBuf {
        self.root.join("data.img")
    }

    /// The disk that carries large files into the machine.
    pub(crate) fn transfer_disk(&self) -> PathBuf {
        self.root.join("transfer.img")
    }

    /// Lock for the transfer disk.
    pub(crate) fn transfer_lock(&self) -> PathBuf {
        self.root.join("transfer.lock")
    }

    /// The programs that were copied in, with their hashes.
    pub(crate) fn synced(&self) -> PathBuf {
        self.root.join("synced.json")
    }

    /// Creates the directory with mode 0700.
    pub(crate) fn create(&self) -> Result<(), MachineError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.root)
            .map_err(file("create", &self.root))
    }
}
