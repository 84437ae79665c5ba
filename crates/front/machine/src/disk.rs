//! The data disk: a sparse file with an ext4 file system.
//!
//! The host creates and grows the file; the machine mounts it. The disk survives stops of the machine and is
//! deleted by `forkd machine rm` only.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use forkd_types::MiB;

use crate::error::{MachineError, file};

/// With less free space on the host, the machine would stop at its first writes.
const MINIMUM_FREE: MiB = MiB(512);

/// Creates the disk, or grows it to the requested size. Returns its size.
pub fn ensure(path: &Path, wanted: Option<MiB>, default: MiB) -> Result<MiB, MachineError> {
    check_room(path)?;
    let current = match fs::metadata(path) {
        Ok(metadata) => to_mib(metadata.len()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let size = wanted.unwrap_or(default);
            create(path, size)?;
            return Ok(size);
        }
        Err(source) => return Err(file("open", path)(source)),
    };
    match wanted {
        Some(wanted) if wanted < current => Err(MachineError::DiskShrink { current, wanted }),
        Some(wanted) if wanted > current => grow(path, wanted).map(|()| wanted),
        _ => Ok(current),
    }
}

pub(crate) fn check_room(path: &Path) -> Result<(), MachineError> {
    let folder = path.parent().unwrap_or(path);
    let stat = rustix::fs::statvfs(folder)
        .map_err(|errno| file("look at the file system of", folder)(errno.into()))?;
    let free = to_mib(stat.f_bavail.saturating_mul(stat.f_frsize));
    if free < MINIMUM_FREE {
        return Err(MachineError::DiskFull {
            path: folder.to_owned(),
            free,
            needed: MINIMUM_FREE,
        });
    }
    Ok(())
}

/// Creates the disk under a temporary name: a start that is killed leaves no partial disk.
fn create(path: &Path, size: MiB) -> Result<(), MachineError> {
    let staging = path.with_extension("new");
    set_size(&staging, size)?;
    run(
        "mke2fs",
        &[
            "-q",
            "-F",
            "-t",
            "ext4",
            "-L",
            "forkd-data",
            "-m",
            "0",
            "-E",
            MKFS_EXTENDED,
        ],
        &staging,
    )?;
    fs::rename(&staging, path).map_err(file("create", path))
}

/// A new sparse file reads as zeroes, so the guest need not write them again in the background.
const MKFS_EXTENDED: &str = "lazy_itable_init=1,lazy_journal_init=1,assume_storage_prezeroed=1";

fn grow(path: &Path, size: MiB) -> Result<(), MachineError> {
    set_size(path, size)?;
    // resize2fs wants the file system checked; -p repairs what is safe to repair.
    run("e2fsck", &["-f", "-p"], path)?;
    run("resize2fs", &[], path)
}

fn set_size(path: &Path, size: MiB) -> Result<(), MachineError> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .and_then(|disk| disk.set_len(size.bytes()))
        .map_err(file("create", path))
}

fn run(program: &'static str, args: &[&str], disk: &Path) -> Result<(), MachineError> {
    let output = Command::new(program)
        .args(args)
        .arg(disk)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| MachineError::Tool {
            program,
            message: error.to_string(),
        })?;
    // e2fsck returns 1 when it has repaired something.
    if output.status.success() || (program == "e2fsck" && output.status.code() == Some(1)) {
        return Ok(());
    }
    let text = if output.stderr.is_empty() {
        output.stdout
    } else {
        output.stderr
    };
    let message = String::from_utf8_lossy(&text).trim().replace('\n', "; ");
    Err(MachineError::Tool { program, message })
}

fn to_mib(bytes: u64) -> MiB {
    MiB(u32::try_from(bytes / (1024 * 1024)).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_disk_is_made_sparse_kept_grown_and_never_shrunk() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.img");
        assert_eq!(ensure(&path, None, MiB(256)).unwrap(), MiB(256));
        let made = fs::metadata(&path).unwrap();
        assert_eq!(made.len(), MiB(256).bytes());
        assert!(made.blocks() * 512 < MiB(64).bytes(), "not sparse");
        assert_eq!(ensure(&path, None, MiB(999)).unwrap(), MiB(256));
        assert_eq!(ensure(&path, Some(MiB(512)), MiB(999)).unwrap(), MiB(512));
        assert!(matches!(
            ensure(&path, Some(MiB(128)), MiB(999)),
            Err(MachineError::DiskShrink { .. })
        ));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
