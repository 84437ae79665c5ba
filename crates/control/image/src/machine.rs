//! The machine image: what `forkd machine` starts under QEMU.

use std::path::{Path, PathBuf};

use forkd_types::{PathError, path_error};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cache::{Cache, CacheError, Key, Kind};
use crate::debian::bootstrap::DebianRoot;
use crate::debian::mirror::MirrorChoice;
use crate::digest::{self, FileDigest};
use crate::image::{self, ImageError};
use crate::initramfs::{self, Flavour, InitramfsError};
use crate::kernel::{Kernel, KernelError};
use crate::progress::Progress;
use crate::recipe::{Recipe, RecipeError};

/// The version of the record's format.
pub const SCHEMA: u32 = 1;
const LAYOUT: &[u8] = b"machine 1";
/// The recipe of its root.
const RECIPE: &str = "machine";

/// Why there is no machine image.
#[derive(Debug, Error)]
pub enum MachineError {
    /// The recipe cannot be used.
    #[error("the recipe of the machine cannot be used")]
    Recipe(#[from] RecipeError),
    /// No kernel.
    #[error("the machine has no kernel")]
    Kernel(#[from] KernelError),
    /// The kernel is an ELF file, which QEMU's ordinary machines do not start.
    #[error("the machine needs a bzImage, and {} has only vmlinux", folder.display())]
    NoBzImage {
        /// The kernel's folder.
        folder: PathBuf,
    },
    /// No initramfs.
    #[error("the machine has no initramfs")]
    Initramfs(#[from] InitramfsError),
    /// No root.
    #[error("the machine has no root")]
    Image(#[from] ImageError),
    /// A file or folder cannot be used.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The cache cannot be used.
    #[error("the machine cache cannot be used")]
    Cache(#[from] CacheError),
}

/// `image.json` of a machine: which parts it was put together from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineRecord {
    /// The version of this format.
    pub schema: u32,
    /// The release of its kernel.
    pub kernel: String,
    /// `vmlinuz`.
    pub vmlinuz: FileDigest,
    /// `initramfs.cpio`, which holds the agent.
    pub initramfs: FileDigest,
    /// `root.ext4`.
    pub root: FileDigest,
    /// The root's packages and the rest of its own record.
    pub image: image::record::ImageRecord,
}

/// A machine image in a folder: `vmlinuz`, `initramfs.cpio`, `root.ext4`, `image.json`.
#[derive(Debug, Clone)]
pub struct MachineImage {
    /// The folder.
    pub folder: PathBuf,
    pub record: MachineRecord,
}

/// Puts a machine together. Its root depends on the recipe and the kernel only: a new agent makes a
/// new initramfs, which takes no time.
pub fn build(
    cache: &Cache,
    kernel: &Kernel,
    agent: &Path,
    mirror: &MirrorChoice,
    refresh: bool,
    progress: &Progress,
) -> Result<MachineImage, MachineError> {
    let vmlinuz = kernel.vmlinuz().ok_or_else(|| MachineError::NoBzImage {
        folder: kernel.folder.clone(),
    })?;
    let recipe = Recipe::built_in(RECIPE)?;
    let source = DebianRoot {
        recipe: &recipe,
        cache,
        mirror,
        kernel: Some(kernel),
    };
    let initramfs = initramfs::build(cache, kernel, agent, Flavour::Machine, progress)?;
    let image = image::build(cache, &recipe, &source, refresh, progress)?;
    let record = MachineRecord {
        schema: SCHEMA,
        kernel: kernel.record.version.clone(),
        vmlinuz: digest_of(&vmlinuz)?,
        initramfs: digest_of(&initramfs)?,
        root: image.record.disk.clone(),
        image: image.record.clone(),
    };
    let text = format!("{:#}\n", serde_json::json!(record));
    let key = Key::new(&record.kernel, &[LAYOUT, text.as_bytes()]);
    let folder = cache.content(Kind::Machine, &key, progress, |staging| {
        for (from, name) in [
            (&vmlinuz, "vmlinuz"),
            (&initramfs, "initramfs.cpio"),
            (&image.disk(), image::DISK),
        ] {
            // All of it lies in one cache, and nobody changes it: a second name is enough.
            let to = staging.join(name);
            std::fs::hard_link(from, &to).map_err(path_error("link", from))?;
        }
        let path = staging.join(image::RECORD);
        std::fs::write(&path, &text).map_err(path_error("write", &path))?;
        Ok::<_, MachineError>(())
    })?;
    Ok(MachineImage { folder, record })
}

fn digest_of(path: &Path) -> Result<FileDigest, MachineError> {
    Ok(digest::of_file(path).map_err(path_error("read", path))?)
}
