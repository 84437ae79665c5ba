//! A control group for everything that is not the agent.

use std::fs::{self, OpenOptions};
use std::os::fd::OwnedFd;

use super::say;
use crate::agent::Role;
use crate::procfs;

const ROOT: &str = "/sys/fs/cgroup";
const USER: &str = "/sys/fs/cgroup/user";
/// Memory that user processes cannot have, KiB: what the agent needs to answer when they take the rest.
const RESERVED_KIB: u64 = 8 * 1024;

/// Makes the group and opens the file through which processes join it. In a sandbox its limits lie just
/// below what the guest has, so that a fork bomb or a memory hog meets the limit of its own group and
/// never the agent.
pub fn set_up(role: Role) -> Option<OwnedFd> {
    let available = fs::read_to_string(format!("{ROOT}/cgroup.controllers")).unwrap_or_default();
    // One at a time: one that cannot be enabled must not keep the others out.
    for controller in available.split_ascii_whitespace() {
        let _ = fs::write(
            format!("{ROOT}/cgroup.subtree_control"),
            format!("+{controller}"),
        );
    }
    if let Err(error) = fs::create_dir_all(USER) {
        say(format_args!("cannot make {USER}: {error}"));
        return None;
    }
    if role == Role::Guest {
        let threads: u64 = procfs::number("/proc/sys/kernel/threads-max").unwrap_or(1024);
        let _ = fs::write(
            format!("{USER}/pids.max"),
            (threads * 3 / 4).max(64).to_string(),
        );
        let memory = procfs::memory();
        let limit = memory
            .available_kib
            .saturating_sub(RESERVED_KIB)
            .max(RESERVED_KIB)
            * 1024;
        let _ = fs::write(format!("{USER}/memory.max"), limit.to_string());
    }
    let procs = OpenOptions::new()
        .write(true)
        .open(format!("{USER}/cgroup.procs"));
    procs.map(OwnedFd::from).ok()
}
