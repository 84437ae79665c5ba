//! Commands about live sandboxes.

use clap::Args;

use super::{DaemonArgs, pair};

/// Arguments of `forkd spawn`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd spawn --tag py -n 5            start five children of py\n  \
    forkd spawn --tag py --timeout 10m   one that is deleted after ten minutes")]
pub struct SpawnArgs {
    /// The snapshot to start from
    #[arg(long, required_unless_present = "sandbox", conflicts_with = "sandbox")]
    pub tag: Option<String>,
    /// A running sandbox to fork instead; it goes on, and its children have its limits
    #[arg(long, value_name = "ID", conflicts_with_all = ["memory_limit_mib", "per_child_netns"])]
    pub sandbox: Option<String>,
    /// How many
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub n: u32,
    /// Taken for compatibility; sandboxes have no network
    #[arg(long)]
    pub per_child_netns: bool,
    /// Limit on host memory for each child
    #[arg(long, value_name = "MIB")]
    pub memory_limit_mib: Option<u64>,
    /// Delete them after this time, such as 30s, 10m or 2h
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<humantime::Duration>,
    /// Put a label on them; may be given several times
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Taken for compatibility
    #[arg(long, hide = true)]
    pub prewarm: bool,
    /// Taken for compatibility
    #[arg(long, hide = true)]
    pub live_fork: bool,
    /// Taken for compatibility
    #[arg(long, hide = true)]
    pub hugepages: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd fork`.
#[derive(Debug, Args)]
#[command(
    after_help = "The children live as long as this command: it deletes them when the time is over, on Ctrl-C and on SIGTERM.\n\
    To keep them, use `forkd spawn`.\n\nExamples:\n  \
    forkd fork --tag py -n 100                        start a hundred, say how long it took, delete them\n  \
    forkd fork --sandbox sb-… -n 3 --settle-secs 600  three copies of a running sandbox, for ten minutes"
)]
pub struct ForkArgs {
    /// The snapshot to start from
    #[arg(long, required_unless_present = "sandbox", conflicts_with = "sandbox")]
    pub tag: Option<String>,
    /// A running sandbox to fork instead; its children have its limits
    #[arg(long, value_name = "ID", conflicts_with_all = ["memory_limit_mib", "per_child_netns"])]
    pub sandbox: Option<String>,
    /// How many
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub n: u32,
    /// How long to keep them, in seconds
    #[arg(long, default_value_t = 2)]
    pub settle_secs: u64,
    /// Taken for compatibility; sandboxes have no network
    #[arg(long)]
    pub per_child_netns: bool,
    /// Limit on host memory for each child
    #[arg(long, value_name = "MIB")]
    pub memory_limit_mib: Option<u64>,
    /// Taken for compatibility
    #[arg(long, hide = true)]
    pub live_fork: bool,
    /// Taken for compatibility
    #[arg(long, hide = true)]
    pub hugepages: bool,
    /// Taken for compatibility
    #[arg(long, hide = true)]
    pub keep_workdir: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Print only ids
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd kill`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("which").required(true).args(["ids", "all", "tag"])))]
pub struct KillArgs {
    /// Sandboxes
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// All of them
    #[arg(long)]
    pub all: bool,
    /// Those started from this snapshot
    #[arg(long)]
    pub tag: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd branch`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd branch sb-… --tag half-way      freeze a running sandbox under a name; it goes on\n  \
    forkd spawn --tag half-way -n 3       three ways to go on from there")]
pub struct BranchArgs {
    /// The sandbox
    pub id: String,
    /// The name of the new snapshot [default: one is made up]
    #[arg(long)]
    pub tag: Option<String>,
    /// Store all memory, not only what differs from the snapshot it came from
    #[arg(long)]
    pub full: bool,
    /// Return as soon as the sandbox runs again
    #[arg(long, conflicts_with = "full")]
    pub no_wait: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd checkpoint`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd checkpoint sb-… --name before-migration   keep the state of a sandbox\n  \
    forkd rollback sb-… --to before-migration       go back to it\n\n\
    Checkpoints live as long as their sandbox.")]
pub struct CheckpointArgs {
    /// The sandbox
    pub id: String,
    /// The name of the checkpoint [default: one is made up]
    #[arg(long, conflicts_with_all = ["list", "rm"])]
    pub name: Option<String>,
    /// List checkpoints instead
    #[arg(long, conflicts_with = "rm")]
    pub list: bool,
    /// Forget this checkpoint instead
    #[arg(long, value_name = "NAME")]
    pub rm: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd rollback`.
#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// The sandbox
    pub id: String,
    /// The checkpoint [default: the newest]
    #[arg(long, value_name = "NAME")]
    pub to: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// The sandbox
    pub id: String,
    /// Only the last bytes
    #[arg(long, value_name = "BYTES")]
    pub tail: Option<u64>,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd top`.
#[derive(Debug, Args)]
#[command(
    after_help = "OWN is memory that only this sandbox has; SHARED is used by others too.\n\
    On a terminal the table is drawn again until Ctrl-C; elsewhere it is printed once."
)]
pub struct TopArgs {
    /// Print it once
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval: u64,
    /// Print JSON, once
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd cleanup`.
#[derive(Debug, Args)]
#[command(after_help = "Without --yes it only says what it would remove.")]
pub struct CleanupArgs {
    /// Do it
    #[arg(short, long)]
    pub yes: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
