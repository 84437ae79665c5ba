//! Copies files into a machine and out of it.
//!
//! Small files travel over the agent's connection, large ones over the transfer disk. Targets are replaced,
//! never overwritten in place: a running program cannot be written to.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use forkd_agent_client::Output;
use forkd_guest_proto::{ExecRequest, FileKind, ReadRequest, WriteRequest};
use tokio::io::AsyncWriteExt;

use super::{Session, agent_error};
use crate::error::{MachineError, file};
use crate::transfer::{self, Parcel};

/// From this size on, the transfer disk is faster than the network.
const LARGE: u64 = 256 * 1024;

/// Reads past the page cache, because the host changes the disk while the machine has it open. tar removes a
/// file before it writes the new one, so that a running program can be replaced.
const UNPACK: &str = r#"
set -e
for found in /sys/block/vd*; do
  if [ "$(cat "$found/serial")" = forkd-transfer ]; then disk=/dev/${found##*/}; fi
done
[ -n "$disk" ] || { echo "the transfer disk is missing" >&2; exit 1; }
mkdir -p "$1"
dd if="$disk" bs=1M count="$2" iflag=direct status=none | tar -x -C "$1" --no-same-owner
"#;

impl Session {
    /// Copies a file or a folder into the machine. A target that ends in a slash is the folder that receives
    /// it.
    pub async fn push(&self, from: &Path, to: &str) -> Result<(), MachineError> {
        let metadata = fs::metadata(from).map_err(file("open", from))?;
        let target = match (to.ends_with('/'), from.file_name()) {
            (true, Some(name)) => format!("{to}{}", name.to_string_lossy()),
            _ => to.to_owned(),
        };
        if metadata.is_dir() {
            return self
                .push_all(
                    vec![Parcel {
                        from: from.to_owned(),
                        to: ".".into(),
                    }],
                    &target,
                )
                .await;
        }
        let Some((folder, name)) = target.rsplit_once('/') else {
            return Err(agent_error(format!("copy to {target} in the machine"))(
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    "the path does not begin with a slash",
                ),
            ));
        };
        let folder = if folder.is_empty() { "/" } else { folder };
        if metadata.len() > LARGE {
            let parcel = Parcel {
                from: from.to_owned(),
                to: name.into(),
            };
            return self.push_all(vec![parcel], folder).await;
        }
        self.push_file(from, &target, metadata.permissions().mode() & 0o7777)
            .await
    }

    async fn push_file(&self, from: &Path, to: &str, mode: u32) -> Result<(), MachineError> {
        let source = tokio::fs::File::open(from)
            .await
            .map_err(file("open", from))?;
        let request = WriteRequest {
            path: to.to_owned(),
            mode: Some(mode),
            // A program that runs cannot be written to, only replaced.
            atomic: true,
            parents: true,
            ..Default::default()
        };
        let action = format!("copy {} to {to} in the machine", from.display());
        self.client
            .upload(request, source)
            .await
            .map_err(agent_error(action))?;
        Ok(())
    }

    /// Copies files and folders into a folder of the machine over the transfer disk.
    pub(super) async fn push_all(
        &self,
        parcels: Vec<Parcel>,
        to: &str,
    ) -> Result<(), MachineError> {
        let action = || format!("copy files to {to} in the machine");
        let Some(transfer) = &self.transfer else {
            return Err(agent_error(action())(io::Error::from(
                io::ErrorKind::Unsupported,
            )));
        };
        let _lock = transfer.lock().await?;
        let length = transfer.fill(parcels).await?;
        let blocks = transfer::blocks(length).to_string();
        let done = self.run(&["sh", "-c", UNPACK, "sh", to, &blocks]).await?;
        check(done.result.status.success(), &done.stderr, action())
    }

    /// Copies a file or a folder out of the machine. A target that is a folder receives the file.
    pub async fn pull(&self, from: &str, to: &Path) -> Result<(), MachineError> {
        let action = || format!("copy {from} out of the machine");
        let info = self
            .client
            .stat(from)
            .await
            .map_err(agent_error(action()))?;
        if info.kind == FileKind::Directory {
            return self.pull_folder(from, to).await;
        }
        let target = match Path::new(from).file_name() {
            Some(name) if to.is_dir() => to.join(name),
            _ => to.to_owned(),
        };
        let staging = staging(&target);
        let out = tokio::fs::File::create(&staging)
            .await
            .map_err(file("create", &staging))?;
        let request = ReadRequest {
            path: from.to_owned(),
            ..Default::default()
        };
        if let Err(error) = self.client.download(request, out).await {
            let _ = fs::remove_file(&staging);
            return Err(agent_error(action())(error));
        }
        fs::set_permissions(&staging, fs::Permissions::from_mode(info.mode & 0o777))
            .and_then(|()| fs::rename(&staging, &target))
            .map_err(file("write", &target))
    }

    async fn pull_folder(&self, from: &str, to: &Path) -> Result<(), MachineError> {
        let action = || format!("copy {from} out of the machine");
        let request = ExecRequest {
            argv: ["tar", "-c", "-C", from, "."].map(str::to_owned).to_vec(),
            ..Default::default()
        };
        let packed = tempfile().map_err(file("create a temporary file for", to))?;
        let mut packed = tokio::fs::File::from_std(packed);
        let mut exec = self
            .client
            .exec(request)
            .await
            .map_err(agent_error(action()))?;
        let mut complaint = Vec::new();
        while let Some(output) = exec.next_output().await.map_err(agent_error(action()))? {
            match output {
                Output::Stdout(bytes) => {
                    packed.write_all(&bytes).await.map_err(file("write", to))?;
                }
                Output::Stderr(bytes) => complaint.extend(bytes),
                Output::Lost { .. } => {}
            }
        }
        let result = exec.wait().await.map_err(agent_error(action()))?;
        check(result.status.success(), &complaint, action())?;
        packed.flush().await.map_err(file("write", to))?;
        let mut packed = packed.into_std().await;
        let target = to.to_owned();
        blocking(move || {
            packed.seek(SeekFrom::Start(0))?;
            fs::create_dir_all(&target)?;
            tar::Archive::new(packed).unpack(&target)
        })
        .await
        .map_err(file("unpack into", to))
    }
}

fn check(success: bool, complaint: &[u8], action: String) -> Result<(), MachineError> {
    if success {
        return Ok(());
    }
    let text = String::from_utf8_lossy(complaint).trim().to_owned();
    Err(agent_error(action)(io::Error::other(text)))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(io::Error::other)?
}

/// An unnamed file that disappears when it is closed.
fn tempfile() -> io::Result<File> {
    tempfile::tempfile()
}

fn staging(target: &Path) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(format!(".part-{}", std::process::id()));
    target.with_file_name(name)
}
