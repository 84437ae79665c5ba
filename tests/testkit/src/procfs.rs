//! Reads facts about processes from `/proc`.
//!
//! Processes may end at any time, so a missing file means that the process is gone.

use std::time::Duration;

use anyhow::Context;

/// Adjacent mappings of at least this size are guest memory.
const GUEST_MEMORY_KIB: u64 = 48 * 1024;

/// Memory of a process in KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Proportional share of everything that is not guest memory.
    pub own_pss: u64,
    /// Proportional share of guest memory.
    pub guest_pss: u64,
}

/// Reads the memory of a VMM. Stacks and heaps are far smaller than any guest, so guest memory is recognised
/// by its size.
pub fn memory(pid: u32) -> anyhow::Result<Memory> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps"))
        .with_context(|| format!("there is no process {pid}"))?;
    let mut regions: Vec<Region> = Vec::new();
    for line in text.lines() {
        if let Some(next) = Region::begin(line) {
            match regions.last_mut() {
                Some(last) if last.end == next.start && last.accessible == next.accessible => {
                    last.end = next.end;
                }
                _ => regions.push(next),
            }
        } else if let (Some(last), Some(pss)) = (regions.last_mut(), kib(line, "Pss:")) {
            last.pss += pss;
        }
    }
    let mut memory = Memory::default();
    for region in regions {
        if region.accessible && region.end - region.start >= GUEST_MEMORY_KIB * 1024 {
            memory.guest_pss += region.pss;
        } else {
            memory.own_pss += region.pss;
        }
    }
    Ok(memory)
}

struct Region {
    start: u64,
    end: u64,
    /// Whether the mapping is readable. Reserved address space is not; it separates heaps from each other.
    accessible: bool,
    pss: u64,
}

impl Region {
    /// Parses the first line of an entry: `start-end perms …`.
    fn begin(line: &str) -> Option<Self> {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            accessible: rest.starts_with('r'),
            pss: 0,
        })
    }
}

fn kib(line: &str, field: &str) -> Option<u64> {
    line.strip_prefix(field)?
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse()
        .ok()
}

/// CPU time of the threads of a VMM, without its vCPUs.
pub fn own_time(pid: u32) -> anyhow::Result<Duration> {
    let mut ticks = 0;
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
        .with_context(|| format!("there is no process {pid}"))?;
    for task in tasks {
        // A thread may end at any time.
        let Ok(stat) = std::fs::read_to_string(task?.path().join("stat")) else {
            continue;
        };
        let (name, rest) = stat.rsplit_once(')').context("no name in stat")?;
        if !name.contains("(vcpu") {
            ticks += thread_ticks(rest);
        }
    }
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_millis(ticks * 1000 / per_second))
}

/// Fields 14 and 15 of a line without its first two fields.
fn thread_ticks(rest: &str) -> u64 {
    rest.split_whitespace()
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u64>().unwrap_or(0))
        .sum()
}

/// Number of open descriptors of a process.
pub fn open_files(pid: u32) -> anyhow::Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// The running child processes of a process.
pub fn children(pid: u32) -> anyhow::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(child) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // A process may end at any time.
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{child}/stat")) else {
            continue;
        };
        let mut fields = stat
            .rsplit_once(')')
            .map(|(_, rest)| rest.split_whitespace())
            .into_iter()
            .flatten();
        let (state, parent) = (fields.next(), fields.next());
        if state != Some("Z") && parent == Some(pid.to_string().as_str()) {
            found.push(child);
        }
    }
    Ok(found)
}

/// The child processes of the first thread that were not waited for. Much faster than [`children`].
pub fn started_by(pid: u32) -> Vec<u32> {
    // A missing file means that the process has ended.
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    text.unwrap_or_default()
        .split_whitespace()
        .filter_map(|child| child.parse().ok())
        .collect()
}

/// Other processes that have a file below a folder open.
pub fn using(folder: &std::path::Path) -> anyhow::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // A process may end at any time.
        let Ok(mut files) = std::fs::read_dir(entry.path().join("fd")) else {
            continue;
        };
        let below = |path: std::path::PathBuf| path.starts_with(folder);
        if pid != std::process::id()
            && files
                .any(|file| file.is_ok_and(|file| std::fs::read_link(file.path()).is_ok_and(below)))
        {
            found.push(pid);
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Whether a process exists and has not ended.
pub fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| {
            let (_, rest) = stat.rsplit_once(')')?;
            Some(!rest.trim_start().starts_with('Z'))
        })
        .unwrap_or(false)
}

/// `MemAvailable` of this host in KiB.
pub fn available_memory() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    text.lines()
        .find_map(|line| kib(line, "MemAvailable:"))
        .context("no MemAvailable in /proc/meminfo")
}

/// Bound Unix sockets whose path lies below a folder.
pub fn unix_sockets_below(folder: &std::path::Path) -> anyhow::Result<usize> {
    let folder = folder.to_string_lossy();
    let text = std::fs::read_to_string("/proc/net/unix")?;
    Ok(text
        .lines()
        .filter(|line| line.contains(&*folder) && !line.ends_with("spawn.sock"))
        .count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_time_and_files() {
        let pid = std::process::id();
        assert!(memory(pid).unwrap().own_pss > 0);
        assert!(open_files(pid).unwrap() > 2);
        own_time(pid).unwrap();
        assert!(is_alive(pid));
    }

    #[test]
    fn who_uses_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let file = std::fs::File::create(folder.path().join("held")).unwrap();
        assert!(using(folder.path()).unwrap().is_empty());
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .stdin(file)
            .spawn()
            .unwrap();
        assert_eq!(using(folder.path()).unwrap(), [child.id()]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(using(folder.path()).unwrap().is_empty());
    }

    #[test]
    fn ticks_in_and_outside_the_kernel_are_added() {
        let rest = " S 1 2 3 4 5 6 7 8 9 10 300 40 0 0 20 0";
        assert_eq!(thread_ticks(rest), 340);
    }

    #[test]
    fn a_first_line_is_told_from_a_field() {
        let region = Region::begin("7f00-8f00 rw-p 00000000 00:00 0").unwrap();
        assert_eq!(
            (region.start, region.end, region.accessible),
            (0x7f00, 0x8f00, true)
        );
        assert!(Region::begin("Pss:                   4 kB").is_none());
        assert_eq!(kib("Pss:                   4 kB", "Pss:"), Some(4));
    }
}
