//! The image of the machine that `forkd machine` starts under QEMU.
//!
//! A [`MachineImage`] combines a kernel, an initramfs with the agent, and the root of the recipe `machine`.
//! The root does not depend on the agent, so a new agent rebuilds the initramfs only.

use std::io;
use std::path::{Path, PathBuf};

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

pub const SCHEMA: u32 = 1;
const LAYOUT: &[u8] = b"machine 1";
const RECIPE: &str = "machine";

/// Why a machine image could not be built.
#[derive(Debug, Error)]
pub enum MachineError {
    #[error("the recipe of the machine cannot be used")]
    Recipe(#[from] RecipeError),
    #[error("cannot build the kernel of the machine")]
    Kernel(#[from] KernelError),
    /// QEMU's ordinary machine types do not boot an ELF kernel.
    #[error("the machine needs a bzImage, and {} has only vmlinux", folder.display())]
    NoBzImage { folder: PathBuf },
    #[error("cannot build the initramfs of the machine")]
    Initramfs(#[from] InitramfsError),
    #[error("cannot build the root of the machine")]
    Image(#[from] ImageError),
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the machine cache cannot be used")]
    Cache(#[from] CacheError),
}

/// `image.json` of a machine: the parts that it consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineRecord {
    pub schema: u32,
    pub kernel: String,
    pub vmlinuz: FileDigest,
    /// `initramfs.cpio`, which contains the agent.
    pub initramfs: FileDigest,
    pub root: FileDigest,
    /// The record of the root.
    pub image: image::record::ImageRecord,
}

/// A machine image in a folder: `vmlinuz`, `initramfs.cpio`, `root.ext4`, `image.json`.
#[derive(Debug, Clone)]
pub struct MachineImage {
    pub folder: PathBuf,
    pub record: MachineRecord,
}

/// Builds a machine image. The root depends on the recipe and the kernel only.
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
    let (suite, variant) = recipe.debian()?;
    let source = DebianRoot {
        recipe: &recipe,
        suite,
        variant,
        cache,
        mirror,
        kernel: Some(kernel),
        refresh,
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
            // Both paths lie in the same cache, and finished content never changes: a hard link is enough.
            let to = staging.join(name);
            std::fs::hard_link(from, &to).map_err(io_error("link", from))?;
        }
        let path = staging.join(image::RECORD);
        std::fs::write(&path, &text).map_err(io_error("write", &path))
    })?;
    Ok(MachineImage { folder, record })
}

fn digest_of(path: &Path) -> Result<FileDigest, MachineError> {
    digest::of_file(path).map_err(io_error("read", path))
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MachineError {
    let path = path.to_owned();
    move |source| MachineError::Io {
        action,
        path,
        source,
    }
}
