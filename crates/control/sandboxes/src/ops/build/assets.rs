//! Kernel, initial RAM disk and root disk of a parent.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use forkd_api::ErrorCode;
use forkd_types::Tag;
use serde::Deserialize;

use super::{BuildRequest, Disk};
use crate::app::App;
use crate::error::Error;

/// Guest memory when nobody says otherwise.
const DEFAULT_MEMORY_MIB: u32 = 512;
/// The record beside an image's disk.
const RECORD: &str = "image.json";

/// What a parent is booted from.
#[derive(Debug, Clone)]
pub struct Assets {
    /// ELF or bzImage.
    pub kernel: PathBuf,
    /// The initial RAM disk with the agent.
    pub initramfs: PathBuf,
    /// The root disk.
    pub disk: PathBuf,
    /// The disk lies in the daemon's own directory and never changes.
    pub immutable: bool,
    /// For people.
    pub image: String,
    /// Guest memory.
    pub memory_mib: u32,
    /// vCPUs.
    pub vcpus: u8,
    /// What to do before the cut.
    pub warmup: Option<ImageWarmup>,
    /// The environment of the interpreter.
    pub env: BTreeMap<String, String>,
}

/// What the record of an image says, as far as it matters here.
#[derive(Debug, Clone, Deserialize)]
struct ImageRecord {
    memory_mib: u32,
    vcpus: u8,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    warmup: Option<ImageWarmup>,
}

/// What an image wants done before its parent is frozen.
#[derive(Debug, Clone, Deserialize)]
pub struct ImageWarmup {
    /// The language.
    pub interpreter: String,
    /// Modules.
    #[serde(default)]
    pub imports: Vec<String>,
    /// Code.
    #[serde(default)]
    pub code: String,
}

/// Finds everything; what is not there is made by `forkd-image`.
pub async fn find(app: &Arc<App>, request: &BuildRequest) -> Result<Assets, Error> {
    let (disk, record, image, immutable) = match &request.disk {
        Disk::Image(name) => {
            let (disk, record) = image(app, name).await?;
            (disk, Some(record), name.to_string(), true)
        }
        Disk::File(path) => {
            let disk = allowed(app, path, "rootfs")?;
            let record = record_beside(&disk);
            (disk, record, path.display().to_string(), false)
        }
    };
    let record = match record {
        Some(path) => Some(read_record(&path)?),
        None => None,
    };
    let kernel = match &request.kernel {
        Some(path) => allowed(app, path, "kernel")?,
        None => installed(app, "vmlinux", &["kernel"], "vmlinux").await?,
    };
    let initramfs = match &request.initramfs {
        Some(path) => allowed(app, path, "initramfs")?,
        None => installed(app, "initramfs.cpio", &["initramfs"], "initramfs").await?,
    };
    Ok(Assets {
        kernel,
        initramfs,
        disk,
        immutable,
        image,
        memory_mib: request
            .memory_mib
            .or(record.as_ref().map(|record| record.memory_mib))
            .unwrap_or(DEFAULT_MEMORY_MIB),
        vcpus: request
            .vcpus
            .or(record.as_ref().map(|record| record.vcpus))
            .unwrap_or(1),
        env: record
            .as_ref()
            .map(|record| record.env.clone())
            .unwrap_or_default(),
        warmup: record.and_then(|record| record.warmup),
    })
}

/// The record of an image, when its disk is named by path.
fn record_beside(disk: &Path) -> Option<PathBuf> {
    let record = disk.parent()?.join(RECORD);
    (disk.file_name()? == "root.ext4" && record.is_file()).then_some(record)
}

/// An image of the daemon's own, or one that `forkd-image` makes.
async fn image(app: &Arc<App>, name: &Tag) -> Result<(PathBuf, PathBuf), Error> {
    let own = app.store.layout().images().join(name.as_str());
    if own.join(RECORD).is_file() {
        return Ok((own.join("root.ext4"), own.join(RECORD)));
    }
    let made = run_image(app, &["build", name.as_str()])
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
    match (path_of(&made, "disk"), path_of(&made, "record")) {
        (Some(disk), Some(record)) => Ok((disk, record)),
        _ => Err(Error::Task),
    }
}

/// A file of the daemon's own, or one that `forkd-image` makes.
async fn installed(
    app: &Arc<App>,
    name: &str,
    command: &[&str],
    key: &str,
) -> Result<PathBuf, Error> {
    let own = app.store.layout().kernels().join(name);
    if own.is_file() {
        return Ok(own);
    }
    let made = run_image(app, command).await?;
    path_of(&made, key).ok_or(Error::Task)
}

fn path_of(made: &serde_json::Value, key: &str) -> Option<PathBuf> {
    made.get(key)?.as_str().map(PathBuf::from)
}

async fn run_image(app: &Arc<App>, args: &[&str]) -> Result<serde_json::Value, Error> {
    let program = &app.config.image_program;
    let output = tokio::process::Command::new(program)
        .args(["--json", "--quiet"])
        .args(args)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await
        .map_err(Error::io("run", program))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let tail: String = stderr.trim().chars().take(2000).collect();
        return Err(Error::refused(
            ErrorCode::LaunchFailed,
            format!("forkd-image {} failed: {tail}", args.join(" ")),
        ));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| {
        Error::refused(
            ErrorCode::Internal,
            format!("forkd-image gave an answer that does not parse: {error}"),
        )
    })
}

fn read_record(path: &Path) -> Result<ImageRecord, Error> {
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        Error::refused(
            ErrorCode::ImageNotFound,
            format!("{} does not parse: {error}", path.display()),
        )
    })
}

/// A path that a request named, if it lies where requests may point: a token is not a pass to every file
/// of the host.
fn allowed(app: &App, path: &Path, what: &str) -> Result<PathBuf, Error> {
    let missing = || {
        Error::refused(
            ErrorCode::InvalidRequest,
            format!("{what} {} does not exist", path.display()),
        )
    };
    let real = path.canonicalize().map_err(|_| missing())?;
    let roots = std::iter::once(&app.config.data_dir).chain(&app.config.allowed_paths);
    for root in roots {
        if root.canonicalize().is_ok_and(|root| real.starts_with(root)) {
            return if real.is_file() {
                Ok(real)
            } else {
                Err(missing())
            };
        }
    }
    Err(Error::hinted(
        ErrorCode::Forbidden,
        format!(
            "{what} {} is outside of the directories this daemon may read",
            path.display()
        ),
        format!(
            "put it below {}, or start the daemon with --allow-path",
            app.config.data_dir.display()
        ),
    ))
}
