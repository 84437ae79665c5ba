//! Arguments of the commands about live sandboxes.

use clap::Args;

use super::{DaemonArgs, LimitArgs, NetworkArgs, PublishArgs, VolumeArgs, pair};

/// Arguments of `forkd spawn`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd spawn --tag py -n 5                        fork five children from the snapshot py\n  \
    forkd spawn --tag py --timeout 10m               delete the child after ten minutes\n  \
    forkd spawn --tag py --memory-limit 512M         limit the host memory of the child\n  \
    forkd spawn --tag py --net public                reach every public address
  \
    forkd spawn --tag py --allow api.example:443     reach one host and nothing else
  \
    forkd spawn --tag py --publish 8080:80           reach port 80 of the child at 127.0.0.1:8080
  \
    forkd spawn --sandbox sb-… -n 3                  fork a running sandbox; it goes on running")]
pub struct SpawnArgs {
    /// Snapshot to fork from
    #[arg(long, required_unless_present = "sandbox", conflicts_with = "sandbox")]
    pub tag: Option<String>,
    /// Running sandbox to fork instead; the children inherit its limits and, without --net, its network policy
    #[arg(long, value_name = "ID", conflicts_with_all = ["limits", "per_child_netns", "publish", "volumes"])]
    pub sandbox: Option<String>,
    /// Freeze the processes in the running sandbox for the cut; the pause is longer
    #[arg(long, requires = "sandbox")]
    pub freeze: bool,
    /// Number of children
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub n: u32,
    /// Give each child a network namespace on the host of the daemon, if the daemon runs as root
    #[arg(long)]
    pub per_child_netns: bool,
    /// Delete the children after this time, such as 30s, 10m or 2h
    #[arg(long, value_name = "TIME")]
    pub timeout: Option<humantime::Duration>,
    /// Put a label on each child; repeatable
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Accepted for compatibility
    #[arg(long, hide = true)]
    pub prewarm: bool,
    /// Accepted for compatibility
    #[arg(long, hide = true)]
    pub live_fork: bool,
    /// Accepted for compatibility
    #[arg(long, hide = true)]
    pub hugepages: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub volumes: VolumeArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
    #[command(flatten)]
    pub publish: PublishArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd fork`.
#[derive(Debug, Args)]
#[command(
    after_help = "The children live as long as this command. It deletes them when --settle-secs is over, on\n\
    Ctrl-C and on SIGTERM. `forkd spawn` starts children that stay.\n\nExamples:\n  \
    forkd fork --tag py -n 100                        fork a hundred children from a snapshot\n  \
    forkd fork --sandbox sb-… -n 3 --settle-secs 600  copy a running sandbox for ten minutes\n\n\
    The agent of a single child is also reached at FORKD_TARGET, or at 10.42.0.2:8888 where this host\n\
    has that address (as root the command adds it to the loopback interface). The published Sandbox\n\
    class of Python uses that address."
)]
pub struct ForkArgs {
    /// Snapshot to fork from
    #[arg(long, required_unless_present = "sandbox", conflicts_with = "sandbox")]
    pub tag: Option<String>,
    /// Running sandbox to fork instead; the children inherit its limits and, without --net, its network policy
    #[arg(long, value_name = "ID", conflicts_with_all = ["limits", "per_child_netns", "volumes"])]
    pub sandbox: Option<String>,
    /// Freeze the processes in the running sandbox for the cut; the pause is longer
    #[arg(long, requires = "sandbox")]
    pub freeze: bool,
    /// Number of children
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub n: u32,
    /// Keep the children this many seconds
    #[arg(long, default_value_t = 2, value_name = "SECONDS")]
    pub settle_secs: u64,
    /// Give each child a network namespace on the host of the daemon, if the daemon runs as root
    #[arg(long)]
    pub per_child_netns: bool,
    /// Accepted for compatibility
    #[arg(long, hide = true)]
    pub live_fork: bool,
    /// Accepted for compatibility
    #[arg(long, hide = true)]
    pub hugepages: bool,
    /// Accepted for compatibility
    #[arg(long, hide = true)]
    pub keep_workdir: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub volumes: VolumeArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Print only IDs
    #[arg(long, short, conflicts_with = "json")]
    pub quiet: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd kill`.
#[derive(Debug, Args)]
#[command(
    group(clap::ArgGroup::new("which").required(true).args(["ids", "all", "tag"])),
    after_help = "Examples:\n  \
    forkd kill sb-…         delete one sandbox\n  \
    forkd kill --tag py     delete every sandbox forked from the snapshot py\n  \
    forkd kill --all        delete every sandbox"
)]
pub struct KillArgs {
    /// IDs of sandboxes
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Delete every sandbox
    #[arg(long)]
    pub all: bool,
    /// Every sandbox forked from this snapshot
    #[arg(long)]
    pub tag: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd branch`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd branch sb-… --tag half-way      freeze a sandbox; it goes on running\n  \
    forkd spawn --tag half-way -n 3       fork three children from that state")]
pub struct BranchArgs {
    /// ID of the sandbox
    pub id: String,
    /// Tag of the new snapshot [default: a generated one]
    #[arg(long)]
    pub tag: Option<String>,
    /// Store all memory instead of the pages that differ from the parent snapshot
    #[arg(long)]
    pub full: bool,
    /// Freeze the processes in the guest for the cut; the pause is longer
    #[arg(long)]
    pub freeze: bool,
    /// Return as soon as the sandbox runs again; the snapshot is written in the background
    #[arg(long, conflicts_with = "full")]
    pub no_wait: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd limits`.
#[derive(Debug, Args)]
#[command(after_help = "A limit that is not given stays as it is. Examples:\n  \
    forkd limits sb-…                       print the limits of a sandbox\n  \
    forkd limits sb-… --cpus 0.5            slow a busy sandbox down\n  \
    forkd limits sb-… --clear --cpus 2      lift every limit but this one")]
pub struct LimitsArgs {
    /// ID of a live sandbox
    pub id: String,
    /// Lift every limit that is not given
    #[arg(long)]
    pub clear: bool,
    /// Print the limits as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd checkpoint`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd checkpoint sb-… --name before-migration   keep the state of a sandbox\n  \
    forkd rollback sb-… --to before-migration       return to it\n\n\
    Checkpoints live as long as their sandbox.")]
pub struct CheckpointArgs {
    /// ID of the sandbox
    pub id: String,
    /// Name of the checkpoint [default: a generated one]
    #[arg(long, conflicts_with_all = ["list", "rm"])]
    pub name: Option<String>,
    /// List checkpoints instead
    #[arg(long, conflicts_with = "rm")]
    pub list: bool,
    /// Delete this checkpoint instead
    #[arg(long, value_name = "NAME")]
    pub rm: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd rollback`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd rollback sb-…                return to the newest checkpoint\n  \
    forkd rollback sb-… --to before    return to a named one")]
pub struct RollbackArgs {
    /// ID of the sandbox
    pub id: String,
    /// Name of the checkpoint [default: the newest]
    #[arg(long, value_name = "NAME")]
    pub to: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd logs`.
#[derive(Debug, Args)]
#[command(
    after_help = "The guest decides what its console says. On a terminal, control characters and escape\n\
    sequences are therefore removed. Into a file or a pipe the bytes go unchanged.\n\nExamples:\n  \
    forkd logs sb-… --tail 4096     the last 4 KiB\n  \
    forkd logs sb-… > console.log   every byte"
)]
pub struct LogsArgs {
    /// ID of the sandbox
    pub id: String,
    /// Print only this many bytes from the end
    #[arg(long, value_name = "BYTES")]
    pub tail: Option<u64>,
    /// Print every byte unchanged, on a terminal too
    #[arg(long)]
    pub raw: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd top`.
#[derive(Debug, Args)]
#[command(
    after_help = "OWN is host memory that only this sandbox uses; SHARED is memory that other sandboxes may use too.\n\
    READ and WRITTEN are bytes that came from and went to disks of the host since the start.\n\
    On a terminal the table is refreshed until Ctrl-C; elsewhere it is printed once."
)]
pub struct TopArgs {
    /// Print the table once
    #[arg(long)]
    pub once: bool,
    /// Seconds between refreshes
    #[arg(long, default_value_t = 2, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval: u64,
    /// Print JSON, once
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd cleanup`.
#[derive(Debug, Args)]
#[command(after_help = "Without --yes the command only lists what it would delete.")]
pub struct CleanupArgs {
    /// Delete what is listed
    #[arg(short, long)]
    pub yes: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
