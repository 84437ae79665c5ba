//! The files that guests are made of: kernel, initramfs, root image, and the programs under test.
//!
//! `FORKD_ASSETS` names a folder with links to the files in the cache. The programs lie beside the running
//! test program.

use std::path::PathBuf;

use anyhow::{Context, ensure};

/// Paths of all assets.
#[derive(Debug, Clone)]
pub struct Assets {
    /// The folder with `forkd-vmm`, `forkd-spawn` and the other programs.
    pub programs: PathBuf,
    pub vmlinux: PathBuf,
    pub bzimage: PathBuf,
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

    /// The path of a program under test.
    pub fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }
}
