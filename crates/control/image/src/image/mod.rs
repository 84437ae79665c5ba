//! Images: an ext4 disk built from a recipe.
//!
//! A [`RootSource`] provides the files, [`finish`] completes them, `root::ext4`
//! writes the disk, and [`record`] describes the result in `image.json`. A finished image is read-only.

pub mod finish;
pub mod record;

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::cache::{Cache, CacheError, Key, Kind};
use crate::digest;
use crate::lock::{self, LockError};
use crate::progress::Progress;
use crate::recipe::{Recipe, RecipeError};
use crate::root::ext4::{self, Disk, Ext4Error};
use crate::root::tree::TreeError;
use crate::root::{ImageSource, Root, RootError, RootSource};
use forkd_formats::image::ImageRecordError;
use record::ImageRecord;

/// Part of every key. Raised when the builder would make another image from the same recipe.
const LAYOUT: &[u8] = b"image 1";
pub use forkd_formats::image::{DISK, RECORD};

/// Why an image could not be built.
#[derive(Debug, Error)]
pub enum ImageError {
    #[error("the recipe cannot be used")]
    Recipe(#[from] RecipeError),
    #[error("cannot build the root of image {name}")]
    Root {
        name: String,
        #[source]
        source: RootError,
    },
    #[error("the packages of a lock file of image {name} cannot be installed")]
    Lock {
        name: String,
        #[source]
        source: LockError,
    },
    #[error("the image {name} cannot be completed")]
    Finish {
        name: String,
        #[source]
        source: TreeError,
    },
    #[error("cannot write the disk of image {name}")]
    Ext4 {
        name: String,
        #[source]
        source: Ext4Error,
    },
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The folder of an image has no valid record.
    #[error("{} does not describe an image", path.display())]
    Record {
        path: PathBuf,
        source: ImageRecordError,
    },
    /// The cache cannot be used.
    #[error("the image cache cannot be used")]
    Cache(#[from] CacheError),
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ImageError {
    let path = path.to_owned();
    move |source| ImageError::Io {
        action,
        path,
        source,
    }
}

/// An image in a folder: `root.ext4` and `image.json`.
#[derive(Debug, Clone)]
pub struct Image {
    pub folder: PathBuf,
    pub record: ImageRecord,
}

impl Image {
    /// Opens a finished image.
    pub fn open(folder: &Path) -> Result<Self, ImageError> {
        let path = folder.join(RECORD);
        let text = std::fs::read(&path).map_err(io_error("read", &path))?;
        let record =
            ImageRecord::parse(&text).map_err(|source| ImageError::Record { path, source })?;
        Ok(Self {
            folder: folder.to_owned(),
            record,
        })
    }

    pub fn disk(&self) -> PathBuf {
        self.folder.join(DISK)
    }
}

/// Builds an image of a recipe on a root. Later calls return the cached image until `refresh` is set.
pub fn build(
    cache: &Cache,
    recipe: &Recipe,
    source: &impl RootSource,
    refresh: bool,
    progress: &Progress,
) -> Result<Image, ImageError> {
    let parts = [LAYOUT, &recipe.fingerprint(), &source.fingerprint()];
    let question = Key::new(recipe.name.as_str(), &parts);
    let folder = cache.answer(Kind::Image, &question, refresh, progress, |staging| {
        make(recipe, source, staging, cache, progress)
    })?;
    Image::open(&folder)
}

/// Builds an image in an empty folder, which is its cache, too.
pub fn build_in(
    folder: &Path,
    recipe: &Recipe,
    source: &impl RootSource,
    progress: &Progress,
) -> Result<Image, ImageError> {
    let cache = Cache::at(folder.join("cache"));
    make(recipe, source, folder, &cache, progress)?;
    Image::open(folder)
}

fn make(
    recipe: &Recipe,
    source: &impl RootSource,
    folder: &Path,
    cache: &Cache,
    progress: &Progress,
) -> Result<Key, ImageError> {
    let work = folder.join("work");
    std::fs::create_dir(&work).map_err(io_error("make the folder", &work))?;
    let mut root = source
        .fetch(&work, progress)
        .map_err(|source| ImageError::Root {
            name: recipe.name.to_string(),
            source,
        })?;
    for one in &recipe.locks {
        lock::install(one, &mut root, &work, cache, progress).map_err(|source| {
            ImageError::Lock {
                name: recipe.name.to_string(),
                source,
            }
        })?;
    }
    let key = write(recipe, root, folder, progress)?;
    std::fs::remove_dir_all(&work).map_err(io_error("remove", &work))?;
    Ok(key)
}

/// Completes the tree, and writes the disk and the record.
fn write(
    recipe: &Recipe,
    mut root: Root,
    staging: &Path,
    progress: &Progress,
) -> Result<Key, ImageError> {
    finish::finish(&mut root, recipe).map_err(|source| ImageError::Finish {
        name: recipe.name.to_string(),
        source,
    })?;
    let epoch = root.tree.clamp_times(i64::MAX);
    let contents = serde_json::json!(root.packages).to_string();
    let uuid = match &root.source {
        ImageSource::Debian { .. } => uuid(&[LAYOUT, &recipe.fingerprint(), contents.as_bytes()]),
        ImageSource::Oci { digest, .. } => {
            uuid(&[LAYOUT, &recipe.fingerprint(), digest.as_bytes()])
        }
    };
    let disk = Disk {
        size: recipe.disk,
        uuid,
        label: recipe.name.to_string(),
        epoch,
    };
    let path = staging.join(DISK);
    let step = progress.step(&format!("writing the disk of {}", recipe.name));
    ext4::write(&root.tree, &disk, &path).map_err(|source| ImageError::Ext4 {
        name: recipe.name.to_string(),
        source,
    })?;
    read_only(&path)?;
    let digest = digest::of_file(&path).map_err(io_error("read", &path))?;
    step.done(&format!("{} MiB in use", allocated_mib(&path)?));
    let mut record = record::new(recipe, root, digest);
    record.uuid = uuid_text(&uuid);
    let path = staging.join(RECORD);
    std::fs::write(&path, record.to_json()).map_err(io_error("write", &path))?;
    Ok(Key::new(
        recipe.name.as_str(),
        &[LAYOUT, &record.disk.digest.0, &record.recipe.0],
    ))
}

/// Guests write to layers of their own, so a write to the cached disk is always a mistake.
fn read_only(path: &Path) -> Result<(), ImageError> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o444))
        .map_err(io_error("protect", path))
}

fn allocated_mib(path: &Path) -> Result<u64, ImageError> {
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(path).map_err(io_error("read", path))?;
    Ok((meta.blocks() * 512) >> 20)
}

/// A UUID derived from the content, marked as version 8 ("custom").
fn uuid(parts: &[&[u8]]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    let mut uuid = [0; 16];
    hasher.finalize_xof().fill(&mut uuid);
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::new();
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_content_decides_the_uuid() {
        let text = uuid_text(&uuid(&[b"a"]));
        assert_eq!(text, uuid_text(&uuid(&[b"a"])));
        assert_ne!(text, uuid_text(&uuid(&[b"b"])));
        assert_eq!(text.len(), 36);
        assert_eq!(&text[14..15], "8");
    }

    #[test]
    fn a_tree_becomes_an_image_folder() {
        let folder = tempfile::tempdir().unwrap();
        let mut recipe = Recipe::built_in("python-numpy").unwrap();
        recipe.disk = forkd_types::MiB(64);
        let mut tree = crate::root::tree::Tree::default();
        tree.put_text("etc/os-release", 0o644, "ID=debian\n")
            .unwrap();
        let package = crate::root::PackageRecord {
            name: "bash".into(),
            version: "5".into(),
        };
        let root = Root {
            tree,
            packages: vec![package.clone()],
            source: crate::root::ImageSource::Debian {
                suite: "trixie".into(),
                variant: crate::recipe::Variant::Minbase,
            },
            kernel: None,
            env: std::collections::BTreeMap::new(),
            run: crate::root::RunDefaults::default(),
        };
        write(&recipe, root, folder.path(), &Progress::silent()).unwrap();
        let image = Image::open(folder.path()).unwrap();
        assert_eq!(image.record.packages, [package]);
        assert_eq!(image.record.disk.size, 64 << 20);
        let bytes = std::fs::read(image.disk()).unwrap();
        let fs = mkext4::reader::Fs::open(&bytes[..]).unwrap();
        let env = fs.read_file(fs.resolve("/etc/forkd/env").unwrap()).unwrap();
        assert!(String::from_utf8(env).unwrap().contains("LANG=C.UTF-8\n"));
    }
}
