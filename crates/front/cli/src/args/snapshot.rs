//! Commands about snapshots.

use clap::Args;

use super::DaemonArgs;

/// Arguments of `forkd snapshot`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd snapshot --tag py --image python-numpy      boot, warm up, freeze\n  \
    forkd snapshot --from-sandbox sb-… --tag half-way   freeze a running sandbox (see forkd branch)")]
pub struct SnapshotArgs {
    /// The name of the new snapshot
    #[arg(long, required_unless_present = "from_sandbox")]
    pub tag: Option<String>,
    /// An image of the daemon's
    #[arg(long, conflicts_with = "rootfs")]
    pub image: Option<String>,
    // The variables of these two are read where they count: clap takes one for something typed, and finds it at odds
    // with what was.
    /// A kernel on the daemon's host [env: FORKD_KERNEL]
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<String>,
    /// A raw disk on the daemon's host [env: FORKD_ROOTFS]
    #[arg(long, value_name = "FILE")]
    pub rootfs: Option<String>,
    /// Guest memory
    #[arg(long, value_name = "MIB")]
    pub mem_size_mib: Option<u32>,
    /// Number of vCPUs
    #[arg(long, value_name = "N")]
    pub vcpus: Option<u8>,
    /// A command to run before the cut, as a shell would split it
    #[arg(long, value_name = "COMMAND")]
    pub warmup: Option<String>,
    /// Python to run in the warm interpreter before the cut
    #[arg(long, value_name = "CODE")]
    pub warmup_code: Option<String>,
    /// How long boot and warm-up may take, in seconds
    #[arg(long, value_name = "SECONDS")]
    pub ready_timeout_secs: Option<u64>,
    /// Freeze this running sandbox instead
    #[arg(
        long,
        value_name = "ID",
        conflicts_with_all = [
            "image",
            "rootfs",
            "kernel",
            "mem_size_mib",
            "vcpus",
            "warmup",
            "warmup_code",
            "ready_timeout_secs",
        ]
    )]
    pub from_sandbox: Option<String>,
    /// With --from-sandbox: store only what differs
    #[arg(long, requires = "from_sandbox", conflicts_with = "live")]
    pub diff: bool,
    /// With --from-sandbox: the default
    #[arg(long, requires = "from_sandbox")]
    pub live: bool,
    /// With --live: return as soon as the sandbox runs again
    #[arg(long, requires = "live")]
    pub no_wait: bool,
    /// Taken for compatibility: disks are always layered
    #[arg(long, hide = true)]
    pub rw: bool,
    /// Taken for compatibility
    #[arg(long, env = "FORKD_TAP", hide = true)]
    pub tap: Option<String>,
    /// Taken for compatibility: a snapshot is cut when it is ready
    #[arg(long, default_value_t = 10, hide = true)]
    pub boot_wait_secs: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd images`.
#[derive(Debug, Args)]
pub struct ImagesArgs {
    /// List what snapshots can be built from instead
    #[arg(long)]
    pub images: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd rmi`.
#[derive(Debug, Args)]
pub struct RmiArgs {
    /// Snapshots
    #[arg(required = true, value_name = "TAG")]
    pub tags: Vec<String>,
    /// Delete those that build on them too
    #[arg(long, conflicts_with = "force")]
    pub cascade: bool,
    /// Delete them even if others build on them; those keep working
    #[arg(long)]
    pub force: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd snapshot-share`.
#[derive(Debug, Args)]
pub struct SnapshotShareArgs {
    /// The snapshot
    pub tag: String,
    /// Only its owner again; children that others have started go on
    #[arg(long)]
    pub private: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd snapshot-info`.
#[derive(Debug, Args)]
pub struct SnapshotInfoArgs {
    /// The snapshot
    pub tag: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd snapshot-compact`.
#[derive(Debug, Args)]
pub struct SnapshotCompactArgs {
    /// The snapshot to flatten
    #[arg(long)]
    pub from: String,
    /// The name of the flat one
    #[arg(long)]
    pub to: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd snapshot-diff`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  forkd snapshot-diff --from py --tag py-ready --exec 'sh -c \"echo ready > /root/state\"'"
)]
pub struct SnapshotDiffArgs {
    /// The snapshot to start from
    #[arg(long)]
    pub from: String,
    /// The name of the new one
    #[arg(long)]
    pub tag: String,
    /// A command to run in between, as a shell would split it
    #[arg(long, value_name = "COMMAND")]
    pub exec: String,
    /// Kill it after this many seconds
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub exec_timeout_secs: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd store`.
#[derive(Debug, Args)]
#[command(
    after_help = "A check marks snapshots that are damaged, so that nothing starts from them, and removes content that no\n\
    snapshot and no sandbox needs. Its exit code is 1 if anything is damaged.\n\nExamples:\n  \
    forkd store                  what snapshots take on disk, and what they may take\n  \
    forkd store --check --deep   read everything and compare it with its digest"
)]
pub struct StoreArgs {
    /// Look for damage instead
    #[arg(long)]
    pub check: bool,
    /// With --check: read every byte
    #[arg(long, requires = "check")]
    pub deep: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
