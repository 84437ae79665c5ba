//! Arguments of the commands about snapshots.

use clap::Args;
use forkd_types::MiB;

use super::{DaemonArgs, VolumeSource};

/// Arguments of `forkd snapshot`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd snapshot --tag py --image python-numpy              boot a parent, warm it up, freeze it\n  \
    forkd snapshot --tag big --image python-numpy --memory 2G --vcpus 2\n  \
    forkd snapshot --tag py-json --image python-numpy --warmup-code 'import json'\n  \
    forkd snapshot --from-sandbox sb-… --tag half-way         freeze a running sandbox")]
pub struct SnapshotArgs {
    /// Tag of the new snapshot
    #[arg(long, required_unless_present = "from_sandbox")]
    pub tag: Option<String>,
    /// Name of an installed image; `forkd images --images` lists them
    #[arg(long, conflicts_with = "rootfs")]
    pub image: Option<String>,
    // The command reads the variables of these two itself. clap would treat a variable like a flag and report a conflict
    // with `--image`.
    /// Path of a kernel on the daemon's host [env: FORKD_KERNEL]
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<String>,
    /// Path of a raw disk image on the daemon's host [env: FORKD_ROOTFS]
    #[arg(long, value_name = "FILE")]
    pub rootfs: Option<String>,
    /// Guest memory, such as 512M or 2G [default: that of the image]
    #[arg(long, visible_alias = "mem-size-mib", value_name = "SIZE")]
    pub memory: Option<MiB>,
    /// Number of vCPUs [default: that of the image]
    #[arg(long, value_name = "N")]
    pub vcpus: Option<u8>,
    /// Engine of the parent and its children: forkd, or firecracker where the daemon has one [default: forkd]
    #[arg(long, value_name = "NAME")]
    pub engine: Option<String>,
    /// Command to run before the cut, split into words like in a shell
    #[arg(long, value_name = "COMMAND")]
    pub warmup: Option<String>,
    /// Python code to run in the warm interpreter before the cut
    #[arg(long, value_name = "CODE")]
    pub warmup_code: Option<String>,
    /// Timeout of boot and warm-up, in seconds
    #[arg(long, value_name = "SECONDS")]
    pub ready_timeout_secs: Option<u64>,
    /// Mount a volume, or an ext4 image of this host, which becomes a volume; every child gets a private copy; repeatable,
    /// at most 3
    #[arg(long = "volume", value_name = "VOLUME-OR-FILE:PATH[:MODE]", value_parser = super::volume::source)]
    pub volumes: Vec<VolumeSource>,
    /// Freeze this running sandbox instead of booting a parent
    #[arg(
        long,
        value_name = "ID",
        conflicts_with_all = [
            "image",
            "rootfs",
            "kernel",
            "memory",
            "vcpus",
            "engine",
            "warmup",
            "warmup_code",
            "ready_timeout_secs",
            "volumes",
        ]
    )]
    pub from_sandbox: Option<String>,
    /// With --from-sandbox: store only the pages that differ from the parent snapshot
    #[arg(long, requires = "from_sandbox", conflicts_with = "live")]
    pub diff: bool,
    /// With --from-sandbox: let the sandbox run while the snapshot is written; the default
    #[arg(long, requires = "from_sandbox")]
    pub live: bool,
    /// With --live: return as soon as the sandbox runs again; the snapshot is written in the background
    #[arg(long, requires = "live")]
    pub no_wait: bool,
    /// Accepted for compatibility: disks are always layered
    #[arg(long, hide = true)]
    pub rw: bool,
    /// Accepted for compatibility
    #[arg(long, env = "FORKD_TAP", hide = true)]
    pub tap: Option<String>,
    /// Accepted for compatibility: a snapshot is cut when it is ready
    #[arg(long, default_value_t = 10, hide = true)]
    pub boot_wait_secs: u64,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd images`.
#[derive(Debug, Args)]
pub struct ImagesArgs {
    /// List images instead of snapshots
    #[arg(long)]
    pub images: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd rmi`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd rmi py                  delete a snapshot on which no other depends\n  \
    forkd rmi --cascade py        delete it together with its dependents\n  \
    forkd rmi --force py          delete only its tag; dependents keep working")]
pub struct RmiArgs {
    /// Tags of snapshots
    #[arg(required = true, value_name = "TAG")]
    pub tags: Vec<String>,
    /// Delete dependent snapshots too
    #[arg(long, conflicts_with = "force")]
    pub cascade: bool,
    /// Delete snapshots that others depend on; the dependents keep working
    #[arg(long)]
    pub force: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd snapshot-share`.
#[derive(Debug, Args)]
pub struct SnapshotShareArgs {
    /// Tag of the snapshot
    pub tag: String,
    /// Only its owner again; children that others have started go on
    #[arg(long)]
    pub private: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd snapshot-info`.
#[derive(Debug, Args)]
pub struct SnapshotInfoArgs {
    /// Tag of the snapshot
    pub tag: String,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd snapshot-compact`.
#[derive(Debug, Args)]
pub struct SnapshotCompactArgs {
    /// Snapshot to copy
    #[arg(long)]
    pub from: String,
    /// Tag of the copy
    #[arg(long)]
    pub to: String,
    /// Print the result as JSON
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
    /// Snapshot to fork the child from
    #[arg(long)]
    pub from: String,
    /// Tag of the new snapshot
    #[arg(long)]
    pub tag: String,
    /// Command to run in the child, split into words like in a shell
    #[arg(long, value_name = "COMMAND")]
    pub exec: String,
    /// Kill the command after this many seconds
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub exec_timeout_secs: u64,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd store`.
#[derive(Debug, Args)]
#[command(
    after_help = "--check marks damaged snapshots, so that nothing can be forked from them, and deletes blobs\n\
    that no snapshot and no sandbox uses. The exit code is 1 if anything is damaged.\n\nExamples:\n  \
    forkd store                  disk usage and limit\n  \
    forkd store --check --deep   read every blob and compare it with its digest"
)]
pub struct StoreArgs {
    /// Check for damage instead
    #[arg(long)]
    pub check: bool,
    /// With --check: read every byte
    #[arg(long, requires = "check")]
    pub deep: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
