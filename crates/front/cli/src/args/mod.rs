//! What can be typed. One file per subcommand; no behaviour here.

mod bench;
mod completions;
mod daemon;
mod doctor;
mod guest;
pub mod machine;
mod man;
mod quickstart;
mod sandbox;
mod snapshot;
mod r#where;
mod workspace;

use clap::{Parser, Subcommand};

pub use bench::BenchArgs;
pub use completions::CompletionsArgs;
pub use daemon::DaemonArgs;
pub use doctor::DoctorArgs;
pub use guest::{CpArgs, EvalArgs, ExecArgs, PingArgs, RunArgs, ShellArgs};
pub use machine::MachineArgs;
pub use man::ManArgs;
pub use quickstart::QuickstartArgs;
pub use sandbox::{
    BranchArgs, CheckpointArgs, CleanupArgs, ForkArgs, KillArgs, LogsArgs, LsArgs, RollbackArgs,
    SpawnArgs, TopArgs,
};
pub use snapshot::{
    ImagesArgs, RmiArgs, SnapshotArgs, SnapshotCompactArgs, SnapshotDiffArgs, SnapshotInfoArgs,
};
pub use r#where::WhereArgs;
pub use workspace::{WorkspaceArgs, WorkspaceCommand};

/// fork(2) for machines: start microVMs copy-on-write from a warm parent.
#[derive(Debug, Parser)]
#[command(
    name = "forkd",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    arg_required_else_help = true,
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage; `exec` passes the guest's own code on.\n\
                  Colour is off when NO_COLOR is set or the output is not a terminal."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// Every subcommand of `forkd`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what forkd does: freeze a warm parent, fork it, branch a child
    Quickstart(QuickstartArgs),
    /// Freeze a parent under a name
    Snapshot(Box<SnapshotArgs>),
    /// Start children of a snapshot, say how long it took, delete them
    Fork(ForkArgs),
    /// Start children of a snapshot
    Spawn(SpawnArgs),
    /// Run a command in a new sandbox of an image
    Run(RunArgs),
    /// Run a command in a sandbox
    Exec(ExecArgs),
    /// Evaluate code in the warm interpreter of a sandbox
    Eval(EvalArgs),
    /// Ask a sandbox's agent whether it is there
    Ping(PingArgs),
    /// Open a shell in a sandbox
    Shell(ShellArgs),
    /// Copy a file into or out of a sandbox
    Cp(CpArgs),
    /// Print what a sandbox wrote to its console
    Logs(LogsArgs),
    /// List live sandboxes
    Ls(LsArgs),
    /// Show what live sandboxes use, again and again
    Top(TopArgs),
    /// End sandboxes
    Kill(KillArgs),
    /// Freeze a running sandbox under a name; it goes on
    Branch(BranchArgs),
    /// Keep the state of a running sandbox to go back to
    Checkpoint(CheckpointArgs),
    /// Go back to a checkpoint; the sandbox keeps its id
    Rollback(RollbackArgs),
    /// List snapshots, or the images they are built from
    Images(ImagesArgs),
    /// Delete snapshots
    Rmi(RmiArgs),
    /// Describe a snapshot
    SnapshotInfo(SnapshotInfoArgs),
    /// Run a command in a child of a snapshot and freeze the result under a new name
    SnapshotDiff(SnapshotDiffArgs),
    /// Make a snapshot without parents from one that has parents
    SnapshotCompact(SnapshotCompactArgs),
    /// Sandboxes with a name that can be put to sleep
    Workspace(WorkspaceArgs),
    /// Measure this host: forks, branches, roll-backs
    Bench(BenchArgs),
    /// Remove sandboxes that ended by themselves and snapshots that cannot be used
    Cleanup(CleanupArgs),
    /// Look at this host and say what to mend
    Doctor(DoctorArgs),
    /// Manage a VM in which KVM works, for hosts that have none
    Machine(MachineArgs),
    /// Print where forkd keeps its files
    Where(WhereArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
    /// Print the manual page
    Man(ManArgs),
}
