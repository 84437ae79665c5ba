//! Host memory of children.
//!
//! User memory is the proportional set size of the VMM processes. Kernel memory is estimated from the change
//! of `MemAvailable`.

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
    /// Proportional set size of the VMM process, guest memory included. Shared pages are divided among the
    /// children.
    pub pss_kib_per_child: u64,
    /// Other memory that became unavailable: page tables, KVM, sockets, and shells that refill the pool.
    pub kernel_kib_per_child: u64,
}

impl Memory {
    /// Counts the memory. `None` if the children are not processes of this host.
    pub fn of(children: &[SandboxInfo], available_before: u64) -> Option<Self> {
        let (mut pss, mut unshared) = (0, 0);
        for child in children {
            let rollup =
                std::fs::read_to_string(format!("/proc/{}/smaps_rollup", child.pid?)).ok()?;
            pss += field(&rollup, "Pss")?;
            // File pages stay available to other processes, no matter who maps them.
            unshared += field(&rollup, "Pss_Anon")? + field(&rollup, "Pss_Shmem")?;
        }
        let taken = available_before.saturating_sub(available_kib().ok()?);
        Some(Self {
            pss,
            kernel: taken.saturating_sub(unshared),
        })
    }

    /// The share of one child.
    pub fn per_child(&self, n: usize) -> Counted {
        let n = n.max(1) as u64;
        Counted {
            pss_kib_per_child: self.pss / n,
            kernel_kib_per_child: self.kernel / n,
        }
    }
}

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
