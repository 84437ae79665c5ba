//! Limits on the host resources of a sandbox: `spawn`, `fork` and `run` share them.

use clap::Args;
use forkd_api::{Cpus, LimitsRequest};
use forkd_types::MiB;

/// Limits on each sandbox that a command starts.
///
/// Only the form is checked here. The daemon checks the ranges, and refuses a limit that it cannot enforce.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Limits on each sandbox")]
#[group(id = "limits", multiple = true)]
pub struct LimitArgs {
    /// Host memory, such as 512M or 2G; pages shared with the snapshot do not count
    #[arg(long, visible_alias = "memory-limit-mib", value_name = "SIZE")]
    pub memory_limit: Option<MiB>,
    /// Host CPUs, such as 0.5 or 2
    #[arg(long, value_name = "N")]
    pub cpus: Option<Cpus>,
    /// Share of contended host CPUs, 1 to 10000; 100 is that of an ordinary process
    #[arg(long, value_name = "N")]
    pub cpu_weight: Option<u64>,
    /// Threads and processes of the VMM on the host
    #[arg(long, value_name = "N")]
    pub pids_limit: Option<u64>,
    /// Bytes per second that each disk reads and writes
    #[arg(long, value_name = "BYTES")]
    pub io_bytes_per_sec: Option<u64>,
    /// Operations per second of each disk
    #[arg(long, value_name = "N")]
    pub io_ops_per_sec: Option<u64>,
}

impl LimitArgs {
    /// The limits as the API takes them.
    pub fn request(&self) -> LimitsRequest {
        LimitsRequest {
            memory_mib: self.memory_limit.map(|size| u64::from(size.0)),
            cpus: self.cpus,
            cpu_weight: self.cpu_weight,
            pids: self.pids_limit,
            io_bytes_per_sec: self.io_bytes_per_sec,
            io_ops_per_sec: self.io_ops_per_sec,
        }
    }
}
