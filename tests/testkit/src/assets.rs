//! What guests are made of: kernel, initramfs, root image, and our own programs.

use std::path::PathBuf;

use anyhow::{Context, ensure};

/// Where everything lies.
#[derive(Debug, Clone)]
pub struct Assets {
    /// `forkd-vmm`, `forkd-spawn` and the others.
    pub programs: PathBuf,
    /// Uncompressed guest kernel.
    pub vmlinux: PathBuf,
    /// Compressed guest kernel.
    pub bzimage: PathBuf,
    /// Initramfs with the agent.
    pub initramfs: PathBuf,
    /// Root image of the `python-numpy` recipe.
    pub image: PathBuf,
}

impl Assets {
    /// From `FORKD_ASSETS` (a folder with `vmlinux`, `vmlinuz`, `initramfs`, `python-numpy.ext4`) and the
    /// folder of the running program.
    pub fn from_env() -> anyhow::Result<Self> {
        let folder = std::env::var_os("FORKD_ASSETS")
            .map(PathBuf::from)
            .context("FORKD_ASSETS is not set: it names the folder with kernel and image")?;
        let program = std::env::current_exe()?;
        let programs = program
            .parent()
            .context("the program lies nowhere")?
            .to_owned();
        let assets = Self {
            programs,
            vmlinux: folder.join("vmlinux"),
            bzimage: folder.join("vmlinuz"),
            initramfs: folder.join("initramfs"),
            image: folder.join("python-numpy.ext4"),
        };
        for file in [
            &assets.vmlinux,
            &assets.bzimage,
            &assets.initramfs,
            &assets.image,
        ] {
            ensure!(file.is_file(), "{} is missing", file.display());
        }
        Ok(assets)
    }

    /// One of our programs.
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }
}
