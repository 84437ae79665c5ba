//! The control group of user processes: everything that is not the agent.

use std::fs;
use std::path::Path;

use super::say;
use crate::agent::Role;
use crate::procfs;
use crate::user_group::UserGroup;

const ROOT: &str = "/sys/fs/cgroup";
const USER: &str = "/sys/fs/cgroup/user";
/// Memory that user processes cannot have, KiB: what the agent needs to answer when they take the rest, and
/// what the kernel spends on them without counting it.
const RESERVED_KIB: std::ops::RangeInclusive<u64> = 12 * 1024..=64 * 1024;
/// The memory that a guest must have for each process it may start, KiB.
const KIB_PER_PROCESS: u64 = 512;

/// Makes the group. In a sandbox its limits lie just below the resources of the guest, so that a fork bomb or a memory
/// hog meets the limit of its own group and never the agent.
pub fn set_up(role: Role) -> Option<UserGroup> {
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
        let threads = procfs::number("/proc/sys/kernel/threads-max").unwrap_or(1024);
        let limits = Limits::of(procfs::memory().available_kib, threads);
        let _ = fs::write(format!("{USER}/pids.max"), limits.processes.to_string());
        let _ = fs::write(
            format!("{USER}/memory.max"),
            (limits.memory_kib * 1024).to_string(),
        );
    }
    UserGroup::open(Path::new(USER))
        .inspect_err(|error| say(format_args!("cannot use {USER}: {error}")))
        .ok()
}

struct Limits {
    processes: u64,
    memory_kib: u64,
}

impl Limits {
    fn of(available_kib: u64, threads: u64) -> Self {
        let reserved = (available_kib / 8).clamp(*RESERVED_KIB.start(), *RESERVED_KIB.end());
        Self {
            processes: (threads * 3 / 4)
                .min(available_kib / KIB_PER_PROCESS)
                .max(64),
            memory_kib: available_kib
                .saturating_sub(reserved)
                .max(*RESERVED_KIB.start()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_leave_room_in_guests_of_every_size() {
        let limits = |mib: u64| {
            let limits = Limits::of(mib * 1024, mib * 8);
            (limits.processes, limits.memory_kib / 1024)
        };
        assert_eq!(limits(30), (64, 18));
        assert_eq!(limits(200), (400, 175));
        assert_eq!(limits(8000), (16_000, 7936));
    }
}
