//! Which file of a machine is where.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::dirs::Dirs;
use crate::error::{MachineError, file};
use crate::name::MachineName;

/// The files of one machine, all below one directory that only its owner can enter.
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

    /// The machine's directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Held while somebody starts, stops or removes the machine. It lies beside the directory, so
    /// that removing the directory does not remove the lock under those who wait for it.
    pub(crate) fn lock(&self) -> PathBuf {
        self.root.with_extension("lock")
    }

    /// What runs.
    pub(crate) fn record(&self) -> PathBuf {
        self.root.join("machine.json")
    }

    /// QEMU's own pid file, written before our record.
    pub(crate) fn pid_file(&self) -> PathBuf {
        self.root.join("qemu.pid")
    }

    /// QEMU's control socket.
    pub(crate) fn qmp(&self) -> PathBuf {
        self.root.join("qmp.sock")
    }

    /// What the kernel and the agent print.
    #[must_use]
    pub fn console(&self) -> PathBuf {
        self.root.join("console.log")
    }

    /// What QEMU itself complains about.
    pub(crate) fn qemu_log(&self) -> PathBuf {
        self.root.join("qemu.log")
    }

    /// The image's initramfs with the secret added.
    pub(crate) fn initrd(&self) -> PathBuf {
        self.root.join("initrd")
    }

    /// The secret that the agent asks for.
    pub(crate) fn token(&self) -> PathBuf {
        self.root.join("token")
    }

    /// The disk that outlives the machine.
    pub(crate) fn data_disk(&self) -> PathBuf {
        self.root.join("data.img")
    }

    /// The disk through which large files get in.
    pub(crate) fn transfer_disk(&self) -> PathBuf {
        self.root.join("transfer.img")
    }

    /// Held while somebody uses the transfer disk.
    pub(crate) fn transfer_lock(&self) -> PathBuf {
        self.root.join("transfer.lock")
    }

    /// Which programs are inside.
    pub(crate) fn synced(&self) -> PathBuf {
        self.root.join("synced.json")
    }

    /// Makes the directory.
    pub(crate) fn create(&self) -> Result<(), MachineError> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.root)
            .map_err(file("create", &self.root))
    }
}
