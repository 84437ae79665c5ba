//! Arguments of `forkd workspace`.

use clap::{Args, Subcommand};
use forkd_types::MiB;

use super::{DaemonArgs, NetworkArgs};

/// Arguments of `forkd workspace`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd workspace create mine --snapshot py   start a named sandbox from a snapshot\n  \
    forkd workspace suspend mine                write its state to disk and free its memory\n  \
    forkd workspace resume mine                 go on from that state")]
pub struct WorkspaceArgs {
    #[command(subcommand)]
    pub command: WorkspaceCommand,
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Subcommands of `forkd workspace`.
#[derive(Debug, Subcommand)]
pub enum WorkspaceCommand {
    /// Create a workspace and start it
    Create {
        /// Name of the workspace
        name: String,
        /// Snapshot to start from
        #[arg(long)]
        snapshot: String,
        /// Give the sandbox a network namespace on the host of the daemon, if the daemon runs as root
        #[arg(long)]
        per_child_netns: bool,
        /// Limit on host memory, such as 512M or 2G
        #[arg(long, visible_alias = "memory-limit-mib", value_name = "SIZE")]
        memory_limit: Option<MiB>,
        #[command(flatten)]
        network: NetworkArgs,
    },
    /// Write the state of a workspace to disk and free its memory
    Suspend {
        /// Name of the workspace
        name: String,
        /// Store only the pages that differ from the snapshot it was started from
        #[arg(long)]
        diff: bool,
    },
    /// Start a suspended workspace
    Resume {
        /// Name of the workspace
        name: String,
    },
    /// List workspaces and their states
    List,
    /// Delete a workspace and its state
    Delete {
        /// Name of the workspace
        name: String,
    },
}
