//! The file systems that every Linux program expects.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::path::Path;

use rustix::mount::{MountFlags, mount};

use super::{BootError, say};

/// Mounts one, after making the place for it.
pub fn place(
    what: &str,
    target: &str,
    kind: &str,
    flags: MountFlags,
    options: Option<&CStr>,
) -> Result<(), BootError> {
    let _ = fs::create_dir_all(target);
    match mount(what, target, kind, flags, options) {
        Ok(()) => Ok(()),
        // The kernel mounts devtmpfs by itself when it is told to.
        Err(rustix::io::Errno::BUSY) => Ok(()),
        Err(errno) => Err(BootError::Mount {
            what: what.to_owned(),
            target: target.to_owned(),
            source: io::Error::from(errno),
        }),
    }
}

/// Mounts the file systems that the agent itself needs.
pub fn early() -> Result<(), BootError> {
    let safe = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    place(
        "devtmpfs",
        "/dev",
        "devtmpfs",
        MountFlags::NOSUID,
        Some(c"mode=0755"),
    )?;
    place("proc", "/proc", "proc", safe, None)?;
    place("sysfs", "/sys", "sysfs", safe, None)?;
    place(
        "tmpfs",
        "/run",
        "tmpfs",
        MountFlags::NOSUID | MountFlags::NODEV,
        Some(c"mode=0755"),
    )
}

/// Mounts the file systems that programs need, on the final root.
pub fn late() {
    let safe = MountFlags::NOSUID | MountFlags::NOEXEC;
    let private = MountFlags::NOSUID | MountFlags::NODEV;
    let wanted: [(&str, &str, &str, MountFlags, Option<&CStr>); 4] = [
        (
            "devpts",
            "/dev/pts",
            "devpts",
            safe,
            Some(c"mode=0620,gid=5,ptmxmode=0666"),
        ),
        ("tmpfs", "/dev/shm", "tmpfs", private, Some(c"mode=1777")),
        ("mqueue", "/dev/mqueue", "mqueue", safe, None),
        ("cgroup2", "/sys/fs/cgroup", "cgroup2", safe, None),
    ];
    for (what, target, kind, flags, options) in wanted {
        if let Err(error) = place(what, target, kind, flags, options)
            && kind != "mqueue"
        {
            say(error);
        }
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = std::os::unix::fs::symlink(target, link);
    }
    let _ = fs::create_dir_all("/run/forkd");
    let _ = fs::create_dir_all("/run/lock");
    if !Path::new("/tmp").is_dir() {
        let _ = place("tmpfs", "/tmp", "tmpfs", private, Some(c"mode=1777"));
    }
}
