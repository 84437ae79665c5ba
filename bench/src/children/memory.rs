//! What children take of the host's memory.

use anyhow::Context;
use forkd_api::SandboxInfo;
use serde::Serialize;

/// Memory of all children together, KiB.
pub struct Memory {
    pss: u64,
    kernel: u64,
}

/// Memory of one child, KiB.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Counted {
    /// Proportional set size of the VMM process, guest memory included: what siblings share is divided among
    /// them.
    pub pss_kib_per_child: u64,
    /// What became unavailable beside that: page tables, KVM, sockets, and shells made to refill the pool.
    pub kernel_kib_per_child: u64,
}

impl Memory {
    /// Counts; none if the children are not processes of this host.
    pub fn of(children: &[SandboxInfo], available_before: u64) -> Option<Self> {
        let (mut pss, mut unshared) = (0, 0);
        for child in children {
            let rollup =
                std::fs::read_to_string(format!("/proc/{}/smaps_rollup", child.pid?)).ok()?;
            pss += field(&rollup, "Pss")?;
            // Pages of files stay available to others, whoever maps them.
            unshared += field(&rollup, "Pss_Anon")? + field(&rollup, "Pss_Shmem")?;
        }
        let taken = available_before.saturating_sub(available_kib().ok()?);
        Some(Self {
            pss,
            kernel: taken.saturating_sub(unshared),
        })
    }

    /// The share of one.
    pub fn per_child(&self, n: usize) -> Counted {
        let n = n.max(1) as u64;
        Counted {
            pss_kib_per_child: self.pss / n,
            kernel_kib_per_child: self.kernel / n,
        }
    }
}

/// `MemAvailable` of this host.
pub fn available_kib() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    field(&text, "MemAvailable").context("/proc/meminfo has no MemAvailable")
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "Rss:  5 kB\nPss:  17 kB\nPss_Anon:  3 kB\n";
        assert_eq!(field(text, "Pss"), Some(17));
        assert_eq!(field(text, "Pss_Anon"), Some(3));
        assert_eq!(field(text, "Pss_Shmem"), None);
    }

    #[test]
    fn this_host_has_memory() {
        assert!(available_kib().unwrap() > 0);
    }
}
