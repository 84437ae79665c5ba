//! Volumes: disks that the host attaches to a machine that runs already.
//!
//! Every machine has empty block devices. The host gives one a disk, and the kernel learns its size a moment later. The
//! agent finds the device by its serial number, waits for the size, and mounts the disk.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forkd_guest_proto::{AgentError, ErrorCode, HoldVolumeRequest, MountVolumeRequest};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use crate::error;
use crate::files::blocking;

/// How long the kernel may take to see a disk that was attached.
const SEEN: Duration = Duration::from_secs(10);
/// Time between two looks. The kernel needs one interrupt and one work item.
const LOOK: Duration = Duration::from_millis(1);

/// Mounts a disk that was attached.
pub async fn mount_disk(request: MountVolumeRequest) -> Result<(), AgentError> {
    let device = attached(&request.serial).await?;
    blocking(move || {
        let path = checked(&request.path)?;
        fs::create_dir_all(&path).map_err(|source| error::at("make", &path, &source))?;
        let mut flags = MountFlags::NOATIME | MountFlags::NODEV | MountFlags::NOSUID;
        if request.read_only {
            flags |= MountFlags::RDONLY;
        }
        mount(&device, &path, "ext4", flags, None)
            .map_err(|errno| error::at("mount a volume at", &path, &errno.into()))
    })
    .await
}

/// Brings the file system of a mount into the state of a clean unmount and holds every write, or lets writes go on. A volume
/// that the guest has unmounted is in that state already. Writes that are held, or not held, stay so.
pub async fn hold(request: HoldVolumeRequest) -> Result<(), AgentError> {
    blocking(move || {
        let path = checked(&request.path)?;
        // Without this check a guest without the mount would hold its root file system.
        if !is_mount(&path) {
            return Ok(());
        }
        match crate::sys::hold_writes(&path, request.held) {
            Err(source) if request.held && is(&source, Errno::BUSY) => Ok(()),
            Err(source) if !request.held && is(&source, Errno::INVAL) => Ok(()),
            done => done.map_err(|source| error::at("hold writes to", &path, &source)),
        }
    })
    .await
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Whether a file system begins at a path.
fn is_mount(path: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
    let above = path.parent().and_then(device);
    device(path).is_some_and(|own| Some(own) != above)
}

/// An absolute path that is not the root.
fn checked(path: &str) -> Result<PathBuf, AgentError> {
    let path = Path::new(path);
    let plain = path
        .components()
        .all(|part| !matches!(part, std::path::Component::ParentDir));
    if !path.is_absolute() || !plain || path.parent().is_none() {
        return Err(error::bad(
            "the path of a volume is absolute, has no .. and is not the root",
        ));
    }
    Ok(path.to_owned())
}

/// The device with a serial number, once its size is known.
async fn attached(serial: &str) -> Result<PathBuf, AgentError> {
    let started = Instant::now();
    loop {
        if let Some(device) = find(serial) {
            return Ok(device);
        }
        if started.elapsed() > SEEN {
            let message = format!("no disk with the serial number {serial:?} has appeared");
            return Err(AgentError::new(ErrorCode::Timeout, message));
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn find(serial: &str) -> Option<PathBuf> {
    let devices = fs::read_dir("/sys/block").ok()?;
    devices.flatten().find_map(|device| {
        let read = |name: &str| fs::read_to_string(device.path().join(name));
        // Asking an empty device for its serial number is a request to the host, so the size is read first.
        let sized = read("size").is_ok_and(|size| size.trim() != "0");
        let ours = sized && read("serial").is_ok_and(|found| found.trim() == serial);
        ours.then(|| Path::new("/dev").join(device.file_name()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_told_from_a_directory() {
        assert!(is_mount(Path::new("/proc")));
        assert!(!is_mount(Path::new("/proc/self/fd")));
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_mount(&dir.path().join("missing")));
        let plain = dir.path().join("plain");
        fs::create_dir(&plain).unwrap();
        assert!(!is_mount(&plain));
    }

    #[test]
    fn paths_of_volumes_are_absolute_and_below_the_root() {
        for good in ["/data", "/mnt/a b", "/data/"] {
            assert!(checked(good).is_ok(), "{good}");
        }
        for bad in ["", "/", "data", "/a/../etc", ".."] {
            assert!(checked(bad).is_err(), "{bad}");
        }
    }
}
