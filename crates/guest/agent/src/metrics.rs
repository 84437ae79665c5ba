//! Resources that the guest uses.

use std::collections::HashSet;
use std::fs;

use forkd_guest_proto::{CpuMetrics, DiskMetrics, Metrics};
use rustix::time::ClockId;

use crate::{clock, procfs};

/// How many disks are told of.
const MAX_DISKS: usize = 32;

/// Reads all metrics of the guest.
pub fn read() -> Metrics {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let loadavg = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let (load, processes) = parse_load(&loadavg);
    Metrics {
        cpu: parse_cpu(&stat),
        memory: procfs::memory(),
        disks: disks(&fs::read_to_string("/proc/self/mounts").unwrap_or_default()),
        load,
        uptime_s: clock::now(ClockId::Boottime) as f64 / 1e9,
        processes,
        agent_rss_kib: own_rss(),
        unix_ms: u64::try_from(clock::now(ClockId::Realtime) / 1_000_000).unwrap_or(0),
    }
}

/// Processor time since boot.
pub fn cpu() -> CpuMetrics {
    parse_cpu(&fs::read_to_string("/proc/stat").unwrap_or_default())
}

fn parse_cpu(stat: &str) -> CpuMetrics {
    // The kernel counts in hundredths of a second, whatever its own timer does.
    const TICK_MS: u64 = 10;
    let mut cpu = CpuMetrics::default();
    for line in stat.lines() {
        let Some(rest) = line.strip_prefix("cpu") else {
            continue;
        };
        if !rest.starts_with(' ') {
            cpu.count += 1;
            continue;
        }
        let mut fields = rest
            .split_ascii_whitespace()
            .map(|field| field.parse::<u64>().unwrap_or(0));
        let mut next = || fields.next().unwrap_or(0).saturating_mul(TICK_MS);
        let (user, nice, system, idle, iowait) = (next(), next(), next(), next(), next());
        let (irq, softirq, steal) = (next(), next(), next());
        cpu.user_ms = user + nice;
        cpu.system_ms = system + irq + softirq;
        (cpu.idle_ms, cpu.iowait_ms, cpu.steal_ms) = (idle, iowait, steal);
    }
    cpu
}

fn parse_load(text: &str) -> ([f64; 3], u32) {
    let mut words = text.split_ascii_whitespace();
    let mut next = || {
        words
            .next()
            .and_then(|word| word.parse().ok())
            .unwrap_or(0.0)
    };
    let load = [next(), next(), next()];
    let all = words
        .next()
        .and_then(|word| word.split_once('/')?.1.parse().ok());
    (load, all.unwrap_or(0))
}

fn disks(mounts: &str) -> Vec<DiskMetrics> {
    let mut seen = HashSet::new();
    let lines = mounts.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (source, mount, fs) = (words.next()?, words.next()?, words.next()?);
        // Only what holds files of its own, and each such thing once.
        let real = source.starts_with('/') || fs == "overlay";
        (real && seen.insert(source.to_owned())).then_some((mount, fs))
    });
    let mut disks: Vec<_> = lines
        .take(MAX_DISKS)
        .filter_map(|(mount, fs)| disk(mount, fs))
        .collect();
    if !disks.iter().any(|disk| disk.mount == "/") {
        disks.extend(disk("/", "rootfs"));
    }
    disks
}

fn disk(mount: &str, fs: &str) -> Option<DiskMetrics> {
    // Spaces in a mount point are written in octal.
    let path = mount.replace("\\040", " ");
    let found = rustix::fs::statvfs(&path).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    Some(DiskMetrics {
        mount: path,
        fs: fs.to_owned(),
        total_bytes: bytes(found.f_blocks),
        used_bytes: bytes(found.f_blocks.saturating_sub(found.f_bfree)),
        available_bytes: bytes(found.f_bavail),
        inodes: found.f_files,
        inodes_free: found.f_ffree,
    })
}

fn own_rss() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm
        .split_ascii_whitespace()
        .nth(1)
        .and_then(|word| word.parse().ok())
        .unwrap_or(0);
    pages.saturating_mul(rustix::param::page_size() as u64) / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read() {
        let cpu = parse_cpu("cpu  10 5 20 1000 7 1 2 3 0 0\ncpu0 1\ncpu1 1\nintr 5\n");
        assert_eq!((cpu.count, cpu.user_ms, cpu.system_ms), (2, 150, 230));
        assert_eq!((cpu.idle_ms, cpu.iowait_ms, cpu.steal_ms), (10_000, 70, 30));
        assert_eq!(
            parse_load("0.5 1.25 2.0 3/77 123\n"),
            ([0.5, 1.25, 2.0], 77)
        );
        assert_eq!(parse_load("junk"), ([0.0; 3], 0));
        let here = read();
        assert!(here.cpu.count > 0 && here.memory.total_kib > 0 && !here.disks.is_empty());
    }
}
