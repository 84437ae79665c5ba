//! `forkd workspace`

use clap::{Args, Subcommand};

use super::DaemonArgs;

/// Arguments of `forkd workspace`.
#[derive(Debug, Args)]
pub struct WorkspaceArgs {
    #[command(subcommand)]
    pub command: WorkspaceCommand,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Subcommands of `forkd workspace`.
#[derive(Debug, Subcommand)]
pub enum WorkspaceCommand {
    /// Make a workspace and start it
    Create {
        /// Its name
        name: String,
        /// The snapshot to start from
        #[arg(long)]
        snapshot: String,
        /// Taken for compatibility; sandboxes have no network
        #[arg(long)]
        per_child_netns: bool,
        /// Limit on host memory
        #[arg(long, value_name = "MIB")]
        memory_limit_mib: Option<u64>,
    },
    /// Write its state down and give its memory back
    Suspend {
        /// Its name
        name: String,
        /// Store only what differs from the snapshot it was started from
        #[arg(long)]
        diff: bool,
    },
    /// Start it again
    Resume {
        /// Its name
        name: String,
    },
    /// List workspaces
    List,
    /// End it and forget its state
    Delete {
        /// Its name
        name: String,
    },
}
