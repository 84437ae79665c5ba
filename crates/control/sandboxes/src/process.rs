//! Processes of the host: memory, processor time and disk traffic as the kernel counts them, and groups that end together.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Child;

/// Ticks of `/proc/PID/stat` in a second; the kernel's interface fixes them.
const TICKS: u64 = 100;

/// Memory and processor time of a process.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Memory that no other process maps.
    pub own_bytes: u64,
    /// Memory that others may have too.
    pub shared_bytes: u64,
    pub cpu_us: u64,
}

/// Reads the usage of a process; all zero for one that has ended.
pub fn usage(pid: u32) -> Usage {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    Usage {
        own_bytes: sum(&rollup, &["Private_Clean:", "Private_Dirty:"]),
        shared_bytes: sum(&rollup, &["Shared_Clean:", "Shared_Dirty:"]),
        cpu_us: cpu_us(&stat).unwrap_or_default(),
    }
}

/// The process group of a program that was started as its leader. Dropping it kills every process in the group.
#[derive(Debug)]
pub struct ProcessGroup(Option<Pid>);

impl ProcessGroup {
    pub fn of(leader: &Child) -> Self {
        let id = leader.id().and_then(|id| i32::try_from(id).ok());
        Self(id.and_then(Pid::from_raw))
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // All of them may have ended.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Where cgroup v2 may be mounted.
const GROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Memory and traffic that the cgroup of a process is charged for. A part that the host does not count is `None`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Charges {
    pub memory_bytes: Option<u64>,
    /// Bytes read from disks.
    pub read_bytes: Option<u64>,
    /// Bytes written to disks.
    pub written_bytes: Option<u64>,
}

/// Reads the charges of a process that has a cgroup of its own; a process in the cgroup of the daemon has none.
pub fn charges(pid: u32) -> Charges {
    group_of(&pid.to_string()).map_or_else(Charges::default, |group| charges_of(&group))
}

/// The cgroup of a process, unless it is that of this one.
fn group_of(pid: &str) -> Option<PathBuf> {
    let path = |pid: &str| {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
        Some(line.to_owned())
    };
    let own = path("self");
    let path = path(pid).filter(|path| Some(path) != own.as_ref())?;
    let mount = GROUPS
        .iter()
        .find(|mount| Path::new(mount).join("cgroup.controllers").exists())?;
    Some(Path::new(mount).join(path))
}

/// Memory that the cgroup of a process holds and that the kernel cannot write back; `None` if it is not counted.
pub fn held_bytes(pid: u32) -> Option<u64> {
    let group = group_of(&pid.to_string())?;
    held(&fs::read_to_string(group.join("memory.stat")).ok()?)
}

fn held(stat: &str) -> Option<u64> {
    let value = |name: &str| {
        stat.lines().find_map(|line| {
            line.strip_prefix(name)?
                .strip_prefix(' ')?
                .parse::<u64>()
                .ok()
        })
    };
    Some(value("anon")? + value("shmem")? + value("kernel").unwrap_or(0))
}

fn charges_of(group: &Path) -> Charges {
    let read = |name: &str| fs::read_to_string(group.join(name)).ok();
    let io = read("io.stat");
    let total = |key: &str| {
        let words = io.as_ref()?.split_whitespace();
        let values = words.filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok());
        Some(values.sum())
    };
    Charges {
        memory_bytes: read("memory.current").and_then(|text| text.trim().parse().ok()),
        read_bytes: total("rbytes="),
        written_bytes: total("wbytes="),
    }
}

/// Anonymous memory of a process, which for a VMM holds every page that its guest has changed; `None` if it is not known.
pub fn anonymous_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("RssAnon:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

fn sum(rollup: &str, names: &[&str]) -> u64 {
    rollup
        .lines()
        .filter(|line| names.iter().any(|name| line.starts_with(name)))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .sum()
}

/// User and system time. The name in the second field may hold anything, so fields are counted after it.
fn cpu_us(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some((user + system) * (1_000_000 / TICKS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_text_is_read() {
        let rollup = "00400000-7ff Rss:\nRss: 10 kB\nShared_Clean: 4 kB\nPrivate_Clean: 2 kB\nPrivate_Dirty: 3 kB\n";
        assert_eq!(sum(rollup, &["Private_Clean:", "Private_Dirty:"]), 5 * 1024);
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0";
        assert_eq!(cpu_us(stat), Some(2_000_000));
        assert_eq!(cpu_us(""), None);
    }

    #[test]
    fn the_charges_of_a_group_are_read() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(charges_of(dir.path()), Charges::default());
        fs::write(dir.path().join("memory.current"), "4096\n").unwrap();
        let io = "8:0 rbytes=10 wbytes=1 rios=7\n8:16 rbytes=5 wbytes=2 rios=7\n";
        fs::write(dir.path().join("io.stat"), io).unwrap();
        let charges = charges_of(dir.path());
        assert_eq!(charges.memory_bytes, Some(4096));
        assert_eq!(
            (charges.read_bytes, charges.written_bytes),
            (Some(15), Some(3))
        );
    }

    #[test]
    fn memory_that_stays_is_told_from_the_page_cache() {
        let stat = "anon 10\nfile 500\nkernel 3\nkernel_stack 1\nshmem 7\nanon_thp 99\n";
        assert_eq!(held(stat), Some(20));
        assert_eq!(held("anon 10\nshmem 7\n"), Some(17));
        assert_eq!(held(""), None);
    }

    #[test]
    fn a_process_in_the_group_of_the_daemon_has_no_charges() {
        assert_eq!(charges(std::process::id()), Charges::default());
        assert_eq!(charges(u32::MAX), Charges::default());
    }

    #[test]
    fn this_process_uses_something_and_a_missing_one_nothing() {
        assert!(usage(std::process::id()).own_bytes > 0);
        assert_eq!(usage(u32::MAX), Usage::default());
    }
}
