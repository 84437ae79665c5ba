//! The machine's image: kernel, initramfs and root disk.
//!
//! [`Image::ensure`] finds an image or calls `forkd-image` to build one. An image is a folder with
//! `image.json` and three files; [`Image::open`] checks that all of them exist.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::dirs::named;
use crate::error::{MachineError, RecordProblem};
use crate::programs;
use crate::progress::Progress;
use crate::record::read_versioned;

const SCHEMA: u32 = 1;
const DESCRIPTION: &str = "image.json";
const BUILDER: &str = "forkd-image";
/// Lines of the builder's output that an error contains.
const LINES_IN_ERROR: usize = 5;

/// An image whose files all exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    pub root: PathBuf,
    /// Identifies the image for users: the name of its folder.
    pub version: String,
}

/// The part of `image.json` that the start needs.
#[derive(Debug, Deserialize)]
struct Description {
    kernel: String,
}

/// The part of the builder's `--json` output that the start needs.
#[derive(Debug, Deserialize)]
struct Built {
    folder: PathBuf,
}

impl Image {
    /// Opens the folder in `FORKD_MACHINE_IMAGE`, or calls the builder, which returns a cached image if it
    /// has one.
    pub async fn ensure(progress: &dyn Progress) -> Result<Self, MachineError> {
        match named("FORKD_MACHINE_IMAGE") {
            Some(folder) => Self::open(&folder),
            None => Self::open(&build(progress).await?),
        }
    }

    /// Opens an image and checks that its files exist.
    pub fn open(folder: &Path) -> Result<Self, MachineError> {
        let path = folder.join(DESCRIPTION);
        let invalid = |source| MachineError::ImageInvalid {
            path: path.clone(),
            source,
        };
        let description: Description = read_versioned(&path, SCHEMA)
            .map_err(invalid)?
            .ok_or_else(|| invalid(RecordProblem::Read(std::io::ErrorKind::NotFound.into())))?;
        let image = Self {
            kernel: folder.join("vmlinuz"),
            initramfs: folder.join("initramfs.cpio"),
            root: folder.join("root.ext4"),
            version: version(folder, &description),
        };
        for part in [&image.kernel, &image.initramfs, &image.root] {
            std::fs::metadata(part).map_err(|source| MachineError::File {
                action: "open",
                path: part.clone(),
                source,
            })?;
        }
        Ok(image)
    }
}

/// The builder names the folder after its content.
fn version(folder: &Path, description: &Description) -> String {
    match folder.file_name() {
        Some(name) => name.to_string_lossy().into_owned(),
        None => description.kernel.clone(),
    }
}

/// Runs the builder and forwards its progress. Returns the folder of the image.
async fn build(progress: &dyn Progress) -> Result<PathBuf, MachineError> {
    let program = programs::find(BUILDER).ok_or(MachineError::ImageToolMissing)?;
    let failed = |message: String| MachineError::ImageFailed { message };
    let child = Command::new(&program)
        .args(["--json", "machine"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(format!("{}: {error}", program.display())))?;
    let mut builder = Builder { child };
    let mut last = Vec::new();
    if let Some(stderr) = builder.child.stderr.take() {
        let mut lines = BufReader::new(stderr).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            progress.builder(&line);
            if last.len() == LINES_IN_ERROR {
                last.remove(0);
            }
            last.push(line);
        }
    }
    let mut answer = Vec::new();
    if let Some(mut stdout) = builder.child.stdout.take() {
        stdout
            .read_to_end(&mut answer)
            .await
            .map_err(|error| failed(error.to_string()))?;
    }
    let status = builder
        .child
        .wait()
        .await
        .map_err(|error| failed(error.to_string()))?;
    if !status.success() {
        return Err(failed(last.join("; ")));
    }
    serde_json::from_slice::<Built>(&answer)
        .map(|built| built.folder)
        .map_err(|error| failed(format!("its answer is not understood: {error}")))
}

/// A running builder. Dropping it sends SIGTERM instead of SIGKILL, because the builder has to end its own
/// child processes.
struct Builder {
    child: Child,
}

impl Drop for Builder {
    fn drop(&mut self) {
        let pid = self
            .child
            .id()
            .and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
        if let (Some(pid), Ok(None)) = (pid, self.child.try_wait()) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_all_parts_is_not_an_image() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(
            Image::open(dir.path()),
            Err(MachineError::ImageInvalid { .. })
        ));
        std::fs::write(
            dir.path().join(DESCRIPTION),
            r#"{"schema":1,"kernel":"6.12"}"#,
        )
        .unwrap();
        std::fs::write(dir.path().join("vmlinuz"), "").unwrap();
        std::fs::write(dir.path().join("initramfs.cpio"), "").unwrap();
        let error = Image::open(dir.path()).unwrap_err();
        assert!(error.to_string().ends_with("root.ext4"), "{error}");
        std::fs::write(dir.path().join("root.ext4"), "").unwrap();
        let version = Image::open(dir.path()).unwrap().version;
        assert_eq!(Some(version.as_ref()), dir.path().file_name());
    }
}
