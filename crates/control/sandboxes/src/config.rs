//! How the daemon keeps and limits sandboxes, checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// How the daemon keeps and limits sandboxes.
#[derive(Debug, Clone)]
pub struct Config {
    /// Everything that is kept.
    pub data_dir: PathBuf,
    /// Directory of the sockets.
    pub run_dir: PathBuf,
    /// The state database.
    pub state_file: PathBuf,
    /// Path of `forkd-spawn`.
    pub spawn_program: PathBuf,
    /// Path of `forkd-image`.
    pub image_program: PathBuf,
    /// Directories besides the data directory from which kernels and disks may be taken.
    pub allowed_paths: Vec<PathBuf>,
    /// Branches that may be under way at once.
    pub branch_concurrency: usize,
    /// Parents that may be built at once.
    pub max_builds: usize,
    /// Sandboxes there may be.
    pub max_sandboxes: usize,
    /// Sandboxes one owner may have.
    pub max_sandboxes_per_token: usize,
    /// The longest a sandbox may live; none is for ever.
    pub max_lifetime: Option<Duration>,
    /// Bytes that the disks and checkpoints of one sandbox may take on the host; 0 is no limit.
    pub disk_limit_bytes: u64,
    /// Bytes that snapshots may take on disk for one more to be made.
    pub store_limit_bytes: Option<u64>,
    /// Memory in MiB that stays free: a create that would go below is refused.
    pub reserve_mib: u64,
    /// How long a child's agent may take to answer.
    pub ready_timeout: Duration,
    /// Shells that stand ready for the shape used last.
    pub pool: u32,
}

impl Config {
    /// A daemon that keeps everything below one directory and starts no VM: what tests begin with.
    pub fn below(root: &Path) -> Self {
        Self {
            data_dir: root.join("data"),
            run_dir: root.join("run"),
            state_file: root.join("state.db"),
            spawn_program: root.join("no-spawn"),
            image_program: root.join("no-image"),
            allowed_paths: Vec::new(),
            branch_concurrency: 4,
            max_builds: 2,
            max_sandboxes: 10,
            max_sandboxes_per_token: 10,
            max_lifetime: None,
            disk_limit_bytes: 0,
            store_limit_bytes: None,
            reserve_mib: 0,
            ready_timeout: Duration::from_secs(1),
            pool: 0,
        }
    }
}
