//! Checks of disk, programs and QEMU.

use std::path::{Path, PathBuf};

use forkd_machine::dirs::Dirs;
use forkd_machine::{MachineError, Qemu};

use super::Check;

const GIB: u64 = 1 << 30;

pub fn checks() -> Vec<Check> {
    let data = data_dir();
    vec![space(&data), reflink(&data), programs(), qemu()]
}

/// Where a daemon of this user would keep its data, or the nearest directory above that exists.
fn data_dir() -> PathBuf {
    let root = rustix::process::geteuid().is_root();
    let wanted = forkd_types::data_dir(root, |key| std::env::var_os(key));
    wanted
        .unwrap_or_else(|| "/".into())
        .ancestors()
        .find(|path| path.exists())
        .map_or_else(|| "/".into(), Path::to_owned)
}

fn space(dir: &Path) -> Check {
    let Ok(fs) = rustix::fs::statvfs(dir) else {
        return Check::skip("disk space", format!("{} cannot be read", dir.display()));
    };
    let free = fs.f_bavail.saturating_mul(fs.f_frsize);
    let detail = format!(
        "{:.1} GiB free at {}",
        free as f64 / GIB as f64,
        dir.display()
    );
    match free {
        free if free >= 5 * GIB => Check::pass("disk space", detail),
        free if free >= GIB => Check::warn("disk space", detail, "a snapshot takes 0.1 to 2 GiB"),
        _ => Check::fail(
            "disk space",
            detail,
            "free disk space, or move the data directory (--data-dir of the daemon)",
        ),
    }
}

/// File systems that can share blocks between files.
fn reflink(dir: &Path) -> Check {
    const BTRFS: u64 = 0x9123_683e;
    const XFS: u64 = 0x5846_5342;
    const BCACHEFS: u64 = 0xca45_1a4e;
    match rustix::fs::statfs(dir) {
        Ok(fs) if [BTRFS, XFS, BCACHEFS].contains(&(fs.f_type as u64)) => Check::pass(
            "reflink",
            format!("the file system of {} can share blocks", dir.display()),
        ),
        Ok(_) => Check::warn(
            "reflink",
            format!("the file system of {} copies", dir.display()),
            "importing a disk takes its size once; btrfs and XFS share blocks",
        ),
        Err(error) => Check::skip("reflink", error.to_string()),
    }
}

fn programs() -> Check {
    let here = std::env::current_exe().ok();
    let beside = |name: &str| {
        here.as_ref()
            .is_some_and(|path| path.with_file_name(name).is_file())
    };
    let missing: Vec<&str> = [
        "forkd-controller",
        "forkd-spawn",
        "forkd-vmm",
        "forkd-net",
        "forkd-broker",
        "forkd-image",
    ]
    .into_iter()
    .filter(|name| !beside(name))
    .collect();
    if missing.is_empty() {
        Check::pass(
            "programs",
            "forkd-controller, forkd-spawn, forkd-vmm, forkd-net, forkd-broker and forkd-image are beside forkd",
        )
    } else {
        Check::warn(
            "programs",
            format!("not beside forkd: {}", missing.join(", ")),
            "a daemon on this host needs them; talking to another host does not",
        )
    }
}

/// The QEMU that `forkd machine` would use.
fn qemu() -> Check {
    let Some(dirs) = Dirs::of_user() else {
        return Check::skip("qemu", "HOME is not set; only `forkd machine` needs it");
    };
    match Qemu::find(&dirs) {
        Ok(qemu) => Check::pass(
            "qemu",
            format!("{} at {}", qemu.version, qemu.program.display()),
        ),
        Err(MachineError::QemuMissing) => {
            Check::skip("qemu", "not installed; only `forkd machine` needs it")
        }
        Err(error) => Check::warn(
            "qemu",
            format!("{error}; only `forkd machine` needs it"),
            error.hint().unwrap_or_default(),
        ),
    }
}
