//! Switches from the initramfs to the root disk.

use std::ffi::CString;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify;
use rustix::mount::{MountFlags, mount_move};

use super::cmdline::{Cmdline, Root};
use super::{BootError, mounts, say};

const DEVICE: &str = "/dev/vda";
const NEW_ROOT: &str = "/newroot";
/// How long a disk may take that the kernel has announced.
const DISK_TIME: Duration = Duration::from_secs(10);
/// The virtio device ID of a block device.
const VIRTIO_BLOCK: &str = "0x0002";

/// Makes the root disk the root, if there is one.
pub fn enter(cmdline: &Cmdline) -> Result<(), BootError> {
    if cmdline.root == Root::Initramfs || !(Path::new(DEVICE).exists() || disk_is_announced()) {
        return Ok(());
    }
    wait_for(DEVICE)?;
    mount_root(cmdline.root == Root::Overlay || is_read_only("vda"))?;
    for place in ["/dev", "/proc", "/sys", "/run"] {
        let target = format!("{NEW_ROOT}{place}");
        let _ = fs::create_dir_all(&target);
        if let Err(errno) = mount_move(place, &target) {
            let source = io::Error::from(errno);
            return Err(BootError::Mount {
                what: place.to_owned(),
                target,
                source,
            });
        }
    }
    // Modules are in the kernel now; their files only take memory.
    let _ = fs::remove_dir_all("/lib/modules");
    let _ = fs::remove_file("/init");
    switch().map_err(|source| BootError::SwitchRoot { source })
}

fn switch() -> io::Result<()> {
    rustix::process::chdir(NEW_ROOT)?;
    mount_move(".", "/")?;
    rustix::process::chroot(".")?;
    Ok(rustix::process::chdir("/")?)
}

fn mount_root(overlay: bool) -> Result<(), BootError> {
    if !overlay {
        return mounts::place(DEVICE, NEW_ROOT, "ext4", MountFlags::NOATIME, None);
    }
    // All of it on one file system in memory, since upper and work must share one.
    mounts::place(
        "tmpfs",
        "/run/root",
        "tmpfs",
        MountFlags::empty(),
        Some(c"mode=0755"),
    )?;
    for part in ["lower", "upper", "work"] {
        let _ = fs::create_dir_all(format!("/run/root/{part}"));
    }
    let read_only = MountFlags::RDONLY | MountFlags::NOATIME;
    // A disk that cannot be written cannot have its journal replayed either.
    mounts::place(
        DEVICE,
        "/run/root/lower",
        "ext4",
        read_only,
        Some(c"noload"),
    )?;
    let options = "lowerdir=/run/root/lower,upperdir=/run/root/upper,workdir=/run/root/work";
    let options = CString::new(options).unwrap_or_default();
    mounts::place(
        "overlay",
        NEW_ROOT,
        "overlay",
        MountFlags::NOATIME,
        Some(&options),
    )
}

fn is_read_only(disk: &str) -> bool {
    fs::read_to_string(format!("/sys/block/{disk}/ro")).is_ok_and(|text| text.trim() == "1")
}

fn disk_is_announced() -> bool {
    let devices = fs::read_dir("/sys/bus/virtio/devices")
        .into_iter()
        .flatten()
        .flatten();
    devices.into_iter().any(|device| {
        fs::read_to_string(device.path().join("device")).is_ok_and(|id| id.trim() == VIRTIO_BLOCK)
    })
}

/// Waits until a device is there, woken by the directory it appears in.
pub fn wait_for(device: &str) -> Result<(), BootError> {
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK);
    let watching = watch
        .as_ref()
        .ok()
        .and_then(|fd| inotify::add_watch(fd, "/dev", inotify::WatchFlags::CREATE).ok());
    let start = Instant::now();
    while !Path::new(device).exists() {
        let left = DISK_TIME.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Err(BootError::NoDisk {
                device: device.to_owned(),
            });
        }
        let (Ok(fd), Some(_)) = (&watch, watching) else {
            say("cannot watch /dev");
            return Err(BootError::NoDisk {
                device: device.to_owned(),
            });
        };
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(0),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let _ = poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout));
        let mut ignored = [0u8; 4096];
        while rustix::io::read(fd, &mut ignored).is_ok_and(|count| count > 0) {}
    }
    Ok(())
}
