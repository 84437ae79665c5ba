//! Counts that the kernel keeps for each process, from `/proc`.

use std::collections::BTreeMap;
use std::fs;

/// Counts by name.
pub type Counts = BTreeMap<String, u64>;

/// A process and the program that it runs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Process {
    pub pid: u32,
    pub program: String,
}

/// The processes of forkd on this host.
pub fn of_forkd() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let mut found: Vec<Process> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid: u32| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            // The kernel keeps 15 characters of a name.
            let program = match name.trim_end() {
                "forkd-controlle" => "controller",
                "forkd-spawn" => "spawn",
                "forkd-vmm" => "vmm",
                _ => return None,
            };
            Some(Process {
                pid,
                program: program.to_owned(),
            })
        })
        .collect();
    found.sort();
    found
}

/// The counts of a process since its start, named `PROGRAM.COUNT`. Empty if it has ended.
pub fn counts(process: &Process) -> Counts {
    let mut all = Counts::new();
    let mut add = |name: &str, value: u64| {
        *all.entry(format!("{}.{name}", process.program))
            .or_default() += value;
    };
    let base = format!("/proc/{}", process.pid);
    let read = |name: &str| fs::read_to_string(format!("{base}/{name}")).unwrap_or_default();
    if let Some((minor, major)) = faults(&read("stat")) {
        add("minor_faults", minor);
        add("major_faults", major);
    }
    let io = read("io");
    for (field, name) in [
        ("syscr", "reads"),
        ("syscw", "writes"),
        ("write_bytes", "written_bytes"),
    ] {
        add(name, field_of(&io, field).unwrap_or(0));
    }
    for task in fs::read_dir(format!("{base}/task")).into_iter().flatten() {
        let path = task.map(|task| task.path().join("status"));
        let status = path.and_then(fs::read_to_string).unwrap_or_default();
        let voluntary = field_of(&status, "voluntary_ctxt_switches");
        add("context_switches", voluntary.unwrap_or(0));
        let forced = field_of(&status, "nonvoluntary_ctxt_switches");
        add("context_switches", forced.unwrap_or(0));
    }
    all
}

/// Private pages of guest memory: those in mappings of files that are not programs or libraries, and in
/// mappings without a file of 2 MiB and more. Smaller ones without a file are the VMM's own stacks and heaps.
pub fn private_guest_pages(pid: u32) -> Option<u64> {
    const SMALLEST_KIB: u64 = 2048;
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).ok()?;
    let (mut pages, mut is_guest, mut has_file) = (0, false, false);
    for line in text.lines() {
        let first = line.split_ascii_whitespace().next().unwrap_or("");
        if !first.ends_with(':') {
            // An address range begins a mapping; its last word is the path, if there is one.
            let named = line.split_ascii_whitespace().nth(5).unwrap_or("");
            has_file = named.starts_with('/');
            is_guest =
                !named.starts_with('[') && !named.contains(".so") && !named.ends_with("/forkd-vmm");
        } else if first == "Size:" {
            is_guest &= has_file || field_of(line, "Size").unwrap_or(0) >= SMALLEST_KIB;
        } else if first == "Anonymous:" && is_guest {
            pages += field_of(line, "Anonymous").unwrap_or(0) / 4;
        }
    }
    Some(pages)
}

/// Fields 10 and 12 of `/proc/PID/stat`. The second field, the name, may contain spaces and brackets.
fn faults(stat: &str) -> Option<(u64, u64)> {
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    Some((fields.get(7)?.parse().ok()?, fields.get(9)?.parse().ok()?))
}

/// The number behind `name:` at the beginning of a line.
fn field_of(text: &str, name: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_found_behind_any_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 11 22 33 44 5 6";
        assert_eq!(faults(stat), Some((11, 33)));
        assert_eq!(faults("7 (short) S 1"), None);
    }

    #[test]
    fn this_process_has_counts() {
        let this = Process {
            pid: std::process::id(),
            program: "this".to_owned(),
        };
        let counts = counts(&this);
        assert!(counts["this.minor_faults"] > 0);
        assert!(counts["this.context_switches"] > 0);
        let gone = Process {
            pid: u32::MAX,
            program: "gone".to_owned(),
        };
        assert!(super::counts(&gone).values().all(|value| *value == 0));
    }
}
