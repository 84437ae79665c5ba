//! The checked settings of the daemon.

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use crate::audit::Limits as AuditLimits;
pub use crate::http::RequestLimits;
pub use crate::listen::{Limits as ConnectionLimits, ListenAddr, TlsFiles};

/// What the daemon was told.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to listen.
    pub listen: Vec<ListenAddr>,
    /// Everything that is kept.
    pub data_dir: PathBuf,
    /// Sockets.
    pub run_dir: PathBuf,
    /// The state database.
    pub state_file: PathBuf,
    /// The audit log, if there is one.
    pub audit_log: Option<PathBuf>,
    /// Limits on the files of the audit log.
    pub audit_limits: AuditLimits,
    /// Tokens of administrators.
    pub token_file: Option<PathBuf>,
    /// TLS for TCP.
    pub tls: Option<TlsFiles>,
    /// Limits on connections.
    pub connections: ConnectionLimits,
    /// `forkd-spawn`.
    pub spawn_program: PathBuf,
    /// `forkd-image`.
    pub image_program: PathBuf,
    /// Directories besides the data directory from which kernels and disks may be taken.
    pub allowed_paths: Vec<PathBuf>,
    /// Branches that may be under way at once.
    pub branch_concurrency: usize,
    /// Sandboxes there may be.
    pub max_sandboxes: usize,
    /// Sandboxes one owner may have.
    pub max_sandboxes_per_token: usize,
    /// Limits on requests.
    pub requests: RequestLimits,
    /// Host names besides those of the loopback under which clients without a token may address the daemon.
    pub allowed_hosts: Vec<String>,
    /// The longest a sandbox may live; none is for ever.
    pub max_lifetime: Option<Duration>,
    /// Bytes that each disk of a sandbox may take on the host; 0 is no limit.
    pub disk_limit_bytes: u64,
    /// Bytes that snapshots may take on disk for one more to be made.
    pub store_limit_bytes: Option<u64>,
    /// Memory in MiB that stays free: a create that would go below is refused.
    pub reserve_mib: u64,
    /// How long a child's agent may take to answer.
    pub ready_timeout: Duration,
    /// Shells that stand ready for the shape used last.
    pub pool: u32,
    /// How long requests may go on after the daemon was told to stop.
    pub drain: Duration,
}

impl Config {
    /// A daemon that keeps everything below one directory, listens nowhere and starts no VM: what tests begin with.
    pub fn below(root: &Path) -> Self {
        Self {
            listen: Vec::new(),
            data_dir: root.join("data"),
            run_dir: root.join("run"),
            state_file: root.join("state.db"),
            audit_log: None,
            audit_limits: AuditLimits::default(),
            token_file: None,
            tls: None,
            connections: ConnectionLimits::default(),
            spawn_program: root.join("no-spawn"),
            image_program: root.join("no-image"),
            allowed_paths: Vec::new(),
            branch_concurrency: 4,
            max_sandboxes: 10,
            max_sandboxes_per_token: 10,
            requests: RequestLimits {
                total: 16,
                per_owner: 16,
                per_second: 0,
            },
            allowed_hosts: Vec::new(),
            max_lifetime: None,
            disk_limit_bytes: 0,
            store_limit_bytes: None,
            reserve_mib: 0,
            ready_timeout: Duration::from_secs(1),
            pool: 0,
            drain: Duration::from_secs(1),
        }
    }
}
