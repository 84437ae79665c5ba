//! Kernel, initial RAM disk and root disk of a parent.
//!
//! [`find`] opens everything that a [`BuildRequest`] names; `forkd-image` makes parts that are not installed. A request
//! may name files only in the allowed directories. A file is opened once and its path is not used again, because the
//! path may lead elsewhere by then.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use forkd_api::ErrorCode;
use forkd_formats::image::{DISK, ImageRecord, MAX_BYTES, RECORD};
use forkd_formats::image_cli::{self, ImageMade, InitramfsMade, KernelMade};
use forkd_formats::prepare::Preparation;
use forkd_os::beneath;
use forkd_store::Layout;
use forkd_types::{Tag, chain};
use serde::de::DeserializeOwned;

use super::{BuildRequest, Disk};
use crate::app::App;
use crate::config::Config;
use crate::error::Error;
use crate::process::ProcessGroup;

/// Guest memory if neither the request nor the image names a size.
const DEFAULT_MEMORY_MIB: u32 = 512;

/// A file of the host, open for reading.
#[derive(Debug, Clone)]
pub struct HostFile {
    /// For people. The path is never opened again: it may lead elsewhere by then.
    pub path: PathBuf,
    pub file: Arc<File>,
}

/// The root disk of a parent.
#[derive(Debug, Clone)]
pub enum RootDisk {
    /// An image of the daemon's own or of `forkd-image`; the file never changes.
    Installed(PathBuf),
    /// A file that a request named; its owner may change it.
    Named(HostFile),
}

/// Everything a parent is booted from.
#[derive(Debug, Clone)]
pub struct Assets {
    /// ELF or bzImage.
    pub kernel: HostFile,
    /// The initial RAM disk with the agent.
    pub initramfs: HostFile,
    pub disk: RootDisk,
    /// Name of the image, or the path of the disk, for people.
    pub image: String,
    pub memory_mib: u32,
    pub vcpus: u8,
    /// Preparation before the cut.
    pub prepare: Preparation,
    /// The environment of the interpreter.
    pub env: BTreeMap<String, String>,
}

/// Finds everything a parent needs. `forkd-image` makes parts that are not installed.
pub async fn find(app: &Arc<App>, request: &BuildRequest) -> Result<Assets, Error> {
    let (disk, record, image) = match &request.disk {
        Disk::Image(name) => {
            let (disk, record) = image(app, name).await?;
            let record = read_record(&open(&record)?)?;
            (RootDisk::Installed(disk), Some(record), name.to_string())
        }
        Disk::File(path) => {
            let allowed = allowed(&app.config, path, "rootfs")?;
            let record = record_beside(&allowed)?;
            let disk = RootDisk::Named(allowed.file);
            (disk, record, path.display().to_string())
        }
        Disk::Stored { path, name } => (RootDisk::Installed(path.clone()), None, name.clone()),
    };
    let kernel = match &request.kernel {
        Some(path) => allowed(&app.config, path, "kernel")?.file,
        None => {
            let own = app.store.layout().kernels().join("vmlinux");
            if own.is_file() {
                open(&own)?
            } else {
                let made: KernelMade = run_image(app, &["kernel"]).await?;
                open(&made.vmlinux)?
            }
        }
    };
    let initramfs = match &request.initramfs {
        Some(path) => allowed(&app.config, path, "initramfs")?.file,
        None => {
            let own = app.store.layout().kernels().join("initramfs.cpio");
            if own.is_file() {
                open(&own)?
            } else {
                let made: InitramfsMade = run_image(app, &["initramfs"]).await?;
                open(&made.initramfs)?
            }
        }
    };
    Ok(Assets {
        kernel,
        initramfs,
        disk,
        image,
        memory_mib: request
            .memory_mib
            .or(record.as_ref().map(|record| record.memory_mib.0))
            .unwrap_or(DEFAULT_MEMORY_MIB),
        vcpus: request
            .vcpus
            .or(record.as_ref().map(|record| record.vcpus))
            .unwrap_or(1),
        env: record
            .as_ref()
            .map(|record| record.env.clone())
            .unwrap_or_default(),
        prepare: record.map(|record| record.prepare).unwrap_or_default(),
    })
}

/// An image of the daemon's own, or one that `forkd-image` makes.
async fn image(app: &Arc<App>, name: &Tag) -> Result<(PathBuf, PathBuf), Error> {
    let own = app.store.layout().images().join(name.as_str());
    if own.join(RECORD).is_file() {
        return Ok((own.join(DISK), own.join(RECORD)));
    }
    let made: ImageMade = run_image(app, &["build", name.as_str()])
        .await
        .map_err(|error| {
            Error::hinted(
                ErrorCode::ImageNotFound,
                format!(
                    "image {name} is not installed and could not be made: {}",
                    error.chain()
                ),
                format!(
                    "install it with `forkd-image install {name} --data-dir {}`; `forkd images --images` lists what there is",
                    app.config.data_dir.display()
                ),
            )
        })?;
    Ok((made.disk, made.record))
}

fn open(path: &Path) -> Result<HostFile, Error> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    Ok(HostFile {
        path: path.to_owned(),
        file: Arc::new(file),
    })
}

async fn run_image<T: DeserializeOwned>(app: &Arc<App>, args: &[&str]) -> Result<T, Error> {
    let program = &app.config.image_program;
    let child = tokio::process::Command::new(program)
        .args(["--json", "--quiet"])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(Error::io("run", program))?;
    // A build that is cancelled also ends the compilers and package managers that the program started.
    let group = ProcessGroup::of(&child);
    let output = child.wait_with_output().await;
    drop(group);
    let output = output.map_err(Error::io("run", program))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let tail: String = stderr.trim().chars().take(2000).collect();
        return Err(Error::refused(
            ErrorCode::LaunchFailed,
            format!("forkd-image {} failed: {tail}", args.join(" ")),
        ));
    }
    image_cli::parse(&output.stdout)
        .map_err(|error| Error::refused(ErrorCode::Internal, chain(&error)))
}

fn read_record(record: &HostFile) -> Result<ImageRecord, Error> {
    let mut bytes = Vec::new();
    (&*record.file)
        .take(MAX_BYTES)
        .read_to_end(&mut bytes)
        .map_err(Error::io("read", &record.path))?;
    ImageRecord::parse(&bytes).map_err(|error| {
        Error::refused(
            ErrorCode::ImageNotFound,
            format!("{}: {}", record.path.display(), chain(&error)),
        )
    })
}

/// A file that a request may use, and the directory that makes it so.
struct Allowed {
    dir: PathBuf,
    relative: PathBuf,
    file: HostFile,
}

/// The record of an image, when a request names its disk by path.
fn record_beside(disk: &Allowed) -> Result<Option<ImageRecord>, Error> {
    if disk.relative.file_name() != Some(OsStr::new(DISK)) {
        return Ok(None);
    }
    let record = disk.relative.with_file_name(RECORD);
    match beneath::open_file(&disk.dir, &record) {
        Ok(file) => read_record(&HostFile {
            path: disk.dir.join(record),
            file: Arc::new(file),
        })
        .map(Some),
        Err(_) => Ok(None),
    }
}

/// Opens a file that a request named, if it lies where requests may point. A token is no pass to the files of the host,
/// nor to the sandboxes, blobs and state of the daemon: of the data directory only images and kernels are allowed.
///
/// A path outside is refused without a look at the file system, so that a request cannot find out what exists there.
/// Symbolic links are refused: a link inside could point anywhere.
fn allowed(config: &Config, path: &Path, what: &str) -> Result<Allowed, Error> {
    let own = Layout::new(&config.data_dir);
    let dirs = [own.images(), own.kernels()]
        .into_iter()
        .chain(config.allowed_paths.iter().cloned());
    for dir in dirs {
        let Some(relative) = below(&dir, path) else {
            continue;
        };
        let file = beneath::open_file(&dir, &relative).map_err(|error| {
            Error::refused(
                ErrorCode::InvalidRequest,
                format!(
                    "{what} {} cannot be opened below {}: {error}",
                    path.display(),
                    dir.display()
                ),
            )
        })?;
        let file = HostFile {
            path: path.to_owned(),
            file: Arc::new(file),
        };
        return Ok(Allowed {
            dir,
            relative,
            file,
        });
    }
    Err(Error::hinted(
        ErrorCode::Forbidden,
        format!(
            "{what} {} is outside of the directories that requests may use",
            path.display()
        ),
        "put it below images/ or kernels/ of the data directory, or start the daemon with --allow-path",
    ))
}

/// The rest of `path` below `dir`, by name alone. The directory may be known by its configured name or by its real one.
fn below(dir: &Path, path: &Path) -> Option<PathBuf> {
    let real = dir.canonicalize().ok();
    let rest = path.strip_prefix(dir).ok();
    let rest = rest.or_else(|| path.strip_prefix(real?).ok())?;
    (!rest.as_os_str().is_empty()).then(|| rest.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn config(root: &Path) -> Config {
        let config = Config {
            allowed_paths: vec![root.join("shared")],
            ..Config::below(root)
        };
        let own = Layout::new(&config.data_dir);
        for dir in [
            own.images(),
            own.kernels(),
            own.blobs(),
            root.join("shared"),
        ] {
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("file"), "content").unwrap();
        }
        config
    }

    #[test]
    fn images_kernels_and_allowed_directories_can_be_named() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path());
        let own = Layout::new(&config.data_dir);
        for dir in [own.images(), own.kernels(), root.path().join("shared")] {
            let allowed = allowed(&config, &dir.join("file"), "rootfs").unwrap();
            let mut text = String::new();
            (&*allowed.file.file).read_to_string(&mut text).unwrap();
            assert_eq!(text, "content");
        }
    }

    /// Memory, state and disks of others lie in the data directory, too.
    #[test]
    fn other_files_of_the_data_directory_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path());
        let own = Layout::new(&config.data_dir);
        std::fs::write(config.data_dir.join("state.db"), "rows").unwrap();
        for path in [
            own.blobs().join("file"),
            config.data_dir.join("state.db"),
            own.images(),
            "/etc/hostname".into(),
            "/no/such/file".into(),
            "file".into(),
        ] {
            let Err(error) = allowed(&config, &path, "rootfs") else {
                panic!("{} is allowed", path.display());
            };
            assert_eq!(error.code(), ErrorCode::Forbidden, "{}", error.chain());
        }
    }

    #[test]
    fn no_way_leads_out_of_an_allowed_directory() {
        let root = tempfile::tempdir().unwrap();
        let config = config(root.path());
        let own = Layout::new(&config.data_dir);
        symlink("../blobs/file", own.images().join("link")).unwrap();
        symlink("../blobs", own.images().join("dir")).unwrap();
        for path in ["../blobs/file", "link", "dir/file", "x/../../blobs/file"] {
            let path = own.images().join(path);
            assert!(allowed(&config, &path, "kernel").is_err(), "{path:?}");
        }
    }
}
