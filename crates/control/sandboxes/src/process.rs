//! Memory and processor time of a process, as the kernel counts them.

use std::fs;

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
    fn this_process_uses_something_and_a_missing_one_nothing() {
        assert!(usage(std::process::id()).own_bytes > 0);
        assert_eq!(usage(u32::MAX), Usage::default());
    }
}
