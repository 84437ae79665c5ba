//! Guest kernels: Debian's cloud kernel, or a kernel of the user.
//!
//! A [`Kernel`] is a folder with `vmlinux`, `kernel.json` and optional parts. [`debian`] downloads and
//! unpacks the package; [`own`] imports a file. Both store the result in the cache under its content.

pub mod bzimage;
pub mod elf;
pub mod modules;
pub mod record;
#[cfg(test)]
pub mod test_elf;

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::cache::{Cache, CacheError, Key, Kind};
use crate::debian::apt::{self, Apt};
use crate::debian::mirror::{Mirror, MirrorChoice};
use crate::debian::{DebianError, SUITE};
use crate::digest;
use crate::progress::Progress;
use bzimage::BzImageError;
use elf::ElfError;
use modules::{Modules, ModulesError};
use record::{KernelRecord, KernelSource, ModuleRecord};

/// Debian's package that depends on the newest cloud kernel.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
/// Part of every key. Raised when the layout of a kernel folder changes.
const LAYOUT: &[u8] = b"kernel 1";

/// Why a kernel is not available.
#[derive(Debug, Error)]
pub enum KernelError {
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The file is neither an ELF kernel nor a bzImage.
    #[error("{} is neither an ELF vmlinux nor a bzImage", path.display())]
    UnknownFormat { path: PathBuf },
    #[error("cannot extract the kernel from {}", path.display())]
    BzImage {
        path: PathBuf,
        #[source]
        source: BzImageError,
    },
    #[error("{} is not a bootable kernel", path.display())]
    Elf {
        path: PathBuf,
        #[source]
        source: ElfError,
    },
    #[error("the kernel package has no {what}")]
    Incomplete { what: &'static str },
    #[error("{} is not a kernel folder of this version: {reason}", path.display())]
    Record { path: PathBuf, reason: String },
    #[error("the modules of the kernel cannot be used")]
    Modules(#[from] ModulesError),
    #[error("Debian's kernel could not be downloaded")]
    Debian(#[from] DebianError),
    #[error("the kernel cache cannot be used")]
    Cache(#[from] CacheError),
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KernelError {
    let path = path.to_owned();
    move |source| KernelError::Io {
        action,
        path,
        source,
    }
}

/// A kernel in a folder: `vmlinux` and `kernel.json`; optionally `vmlinuz`, `config` and `modules/`.
#[derive(Debug, Clone)]
pub struct Kernel {
    pub folder: PathBuf,
    pub record: KernelRecord,
}

impl Kernel {
    /// Opens a finished kernel folder.
    pub fn open(folder: &Path) -> Result<Self, KernelError> {
        let path = folder.join("kernel.json");
        let text = std::fs::read(&path).map_err(io_error("read", &path))?;
        let record =
            KernelRecord::parse(&text).map_err(|reason| KernelError::Record { path, reason })?;
        Ok(Self {
            folder: folder.to_owned(),
            record,
        })
    }

    pub fn vmlinux(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    /// The bzImage. `None` for an ELF kernel of the user.
    pub fn vmlinuz(&self) -> Option<PathBuf> {
        self.record
            .files
            .contains_key("vmlinuz")
            .then(|| self.folder.join("vmlinuz"))
    }

    pub fn modules(&self) -> Result<Modules, KernelError> {
        let folder = self.folder.join("modules");
        if folder.is_dir() {
            Ok(Modules::open(&folder)?)
        } else {
            Ok(Modules::none())
        }
    }
}

/// Debian's cloud kernel. Later calls return the cached kernel until `refresh` is set.
pub fn debian(
    cache: &Cache,
    mirror: &MirrorChoice,
    refresh: bool,
    progress: &Progress,
) -> Result<Kernel, KernelError> {
    let question = Key::new(
        "debian",
        &[LAYOUT, SUITE.as_bytes(), META_PACKAGE.as_bytes()],
    );
    let folder = cache.answer(Kind::Kernel, &question, refresh, progress, |staging| {
        download(cache, &mirror.resolve()?, staging, progress)
    })?;
    Kernel::open(&folder)
}

fn download(
    cache: &Cache,
    mirror: &Mirror,
    staging: &Path,
    progress: &Progress,
) -> Result<Key, KernelError> {
    let apt = Apt::update(cache, mirror, progress)?;
    let meta = apt.show(META_PACKAGE)?;
    let package = apt.show(meta.dependency("linux-image-")?)?;
    let step = progress.step(&format!("downloading {} {}", package.name, package.version));
    let work = staging.join("work");
    let root = work.join("root");
    std::fs::create_dir_all(&root).map_err(io_error("make the folder", &root))?;
    let deb = apt.download(&package, &work)?;
    step.done("");
    drop(apt);
    let step = progress.step("unpacking the kernel");
    apt::unpack(&deb, &root)?;
    let boot = root.join("boot");
    move_file(
        &find_by_prefix(&boot, "vmlinuz-", "vmlinuz")?,
        &staging.join("vmlinuz"),
    )?;
    move_file(
        &find_by_prefix(&boot, "config-", "config")?,
        &staging.join("config"),
    )?;
    let library = ["usr/lib/modules", "lib/modules"]
        .iter()
        .map(|folder| root.join(folder))
        .find(|folder| folder.is_dir())
        .ok_or(KernelError::Incomplete { what: "modules" })?;
    move_file(
        &find_by_prefix(&library, "", "modules")?,
        &staging.join("modules"),
    )?;
    std::fs::remove_dir_all(&work).map_err(io_error("remove", &work))?;
    let source = KernelSource::Debian {
        suite: SUITE.to_owned(),
        sha256: package.sha256,
        package: package.name,
        version: package.version,
    };
    let record = finish(staging, source)?;
    step.done(&format!("Linux {}", record.version));
    Ok(content_key(&record))
}

/// A kernel of the user, ELF or bzImage, with or without modules.
pub fn own(
    cache: &Cache,
    kernel: &Path,
    modules: Option<&Path>,
    progress: &Progress,
) -> Result<Kernel, KernelError> {
    let file = digest::of_file(kernel).map_err(io_error("read", kernel))?;
    let mut parts = vec![LAYOUT.to_vec(), file.digest.0.to_vec()];
    if let Some(folder) = modules {
        parts.push(modules_fingerprint(folder)?);
    }
    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    let question = Key::new("own", &parts);
    let folder = cache.answer(Kind::Kernel, &question, false, progress, |staging| {
        let bytes = std::fs::read(kernel).map_err(io_error("read", kernel))?;
        let name = if bzimage::is_bzimage(&bytes) {
            "vmlinuz"
        } else if bytes.starts_with(b"\x7fELF") {
            "vmlinux"
        } else {
            return Err(KernelError::UnknownFormat {
                path: kernel.to_owned(),
            });
        };
        write(&staging.join(name), &bytes)?;
        if let Some(folder) = modules {
            copy_tree(folder, &staging.join("modules"))?;
        }
        let source = KernelSource::Own {
            path: kernel.to_owned(),
        };
        Ok(content_key(&finish(staging, source)?))
    })?;
    Kernel::open(&folder)
}

fn content_key(record: &KernelRecord) -> Key {
    Key::new(&record.version, &[LAYOUT, record.content().as_bytes()])
}

/// Extracts `vmlinux` from `vmlinuz` if necessary, and writes the record.
fn finish(staging: &Path, source: KernelSource) -> Result<KernelRecord, KernelError> {
    let bzimage = staging.join("vmlinuz");
    let path = staging.join("vmlinux");
    let mut compression = None;
    let bytes = if bzimage.exists() {
        let packed = std::fs::read(&bzimage).map_err(io_error("read", &bzimage))?;
        let (bytes, how) = bzimage::extract(&packed).map_err(|source| KernelError::BzImage {
            path: bzimage.clone(),
            source,
        })?;
        compression = Some(how.name().to_owned());
        bytes
    } else {
        std::fs::read(&path).map_err(io_error("read", &path))?
    };
    let kernel = elf::inspect_kernel(&bytes).map_err(|source| KernelError::Elf {
        path: if bzimage.exists() {
            bzimage
        } else {
            path.clone()
        },
        source,
    })?;
    write(&path, bytes.get(..kernel.length).unwrap_or(&bytes))?;
    let mut record = KernelRecord::new(kernel.version, source);
    record.pvh_entry = kernel.pvh_entry;
    record.compression = compression;
    for name in ["vmlinux", "vmlinuz", "config"] {
        let path = staging.join(name);
        if path.exists() {
            let digest = digest::of_file(&path).map_err(io_error("read", &path))?;
            record.files.insert(name.to_owned(), digest);
        }
    }
    let folder = staging.join("modules");
    if folder.is_dir() {
        for (name, path) in Modules::open(&folder)?.list() {
            let full = folder.join(path);
            record.modules.push(ModuleRecord {
                name: name.to_owned(),
                path: path.to_owned(),
                file: digest::of_file(&full).map_err(io_error("read", &full))?,
            });
        }
    }
    write(&staging.join("kernel.json"), record.to_json().as_bytes())?;
    Ok(record)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), KernelError> {
    std::fs::write(path, bytes).map_err(io_error("write", path))
}

fn move_file(from: &Path, to: &Path) -> Result<(), KernelError> {
    std::fs::rename(from, to).map_err(io_error("move", from))
}

fn find_by_prefix(folder: &Path, prefix: &str, what: &'static str) -> Result<PathBuf, KernelError> {
    std::fs::read_dir(folder)
        .map_err(io_error("read", folder))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(prefix))
        })
        .ok_or(KernelError::Incomplete { what })
}

/// Names, sizes and times of a module folder. They change when the folder changes.
fn modules_fingerprint(folder: &Path) -> Result<Vec<u8>, KernelError> {
    use std::os::unix::fs::MetadataExt;
    let mut text = String::new();
    for (name, path) in Modules::open(folder)?.list() {
        let path = folder.join(path);
        let meta = std::fs::metadata(&path).map_err(io_error("read", &path))?;
        text.push_str(&format!(
            "{name} {} {}.{}\n",
            meta.len(),
            meta.mtime(),
            meta.mtime_nsec()
        ));
    }
    Ok(text.into_bytes())
}

/// Copies folders and plain files. Links lead out of a module folder and are skipped.
pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<(), KernelError> {
    std::fs::create_dir_all(to).map_err(io_error("make the folder", to))?;
    for entry in std::fs::read_dir(from).map_err(io_error("read", from))? {
        let entry = entry.map_err(io_error("read", from))?;
        let kind = entry.file_type().map_err(io_error("read", from))?;
        let target = to.join(entry.file_name());
        if kind.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else if kind.is_file() {
            std::fs::copy(entry.path(), &target).map_err(io_error("copy", &entry.path()))?;
        }
    }
    Ok(())
}
