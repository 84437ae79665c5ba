//! The machine's image: kernel, initramfs and root disk, made by `forkd-image`.

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
/// Lines of the builder that an error shows.
const LINES_IN_ERROR: usize = 5;

/// An image that is there and complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    pub root: PathBuf,
    /// What tells it from other images, for people.
    pub version: String,
}

/// `image.json` as the builder writes it. What else is in there is for people.
#[derive(Debug, Deserialize)]
struct Description {
    /// The release of the kernel.
    kernel: String,
}

/// What the builder prints with `--json`.
#[derive(Debug, Deserialize)]
struct Built {
    folder: PathBuf,
}

impl Image {
    /// The image to start: the folder that `FORKD_MACHINE_IMAGE` names, else what the builder makes or
    /// has made before.
    pub async fn ensure(progress: &dyn Progress) -> Result<Self, MachineError> {
        match named("FORKD_MACHINE_IMAGE") {
            Some(folder) => Self::open(&folder),
            None => Self::open(&build(progress).await?),
        }
    }

    /// Opens a folder with an image.
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

/// The builder names the folder after the content.
fn version(folder: &Path, description: &Description) -> String {
    match folder.file_name() {
        Some(name) => name.to_string_lossy().into_owned(),
        None => description.kernel.clone(),
    }
}

/// Starts the builder and passes its progress on.
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

/// A running builder. Asked to end, not killed, when nobody waits for it any more: it has programs of
/// its own to end.
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
