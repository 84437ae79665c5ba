//! What can be typed: a file for each group of subcommands. No behaviour here.

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
mod token;
mod r#where;
mod workspace;

use clap::{ArgMatches, CommandFactory, Parser, Subcommand};

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
    SnapshotShareArgs, StoreArgs,
};
pub use token::{TokenArgs, TokenCommand};
pub use r#where::WhereArgs;
pub use workspace::{WorkspaceArgs, WorkspaceCommand};

/// The image of commands that need one, unless another is named.
pub const DEFAULT_IMAGE: &str = "python-numpy";

/// fork(2) for machines: start microVMs copy-on-write from a warm parent.
#[derive(Debug, Parser)]
#[command(
    name = "forkd",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    arg_required_else_help = true,
    after_help = "Exit codes:\n  \
        0      done\n  \
        1      failed\n  \
        2      wrong usage\n  \
        125    forkd itself failed, where the code is else that of a program: of exec, run\n         \
               and shell, and of machine exec and machine shell\n  \
        126    that program cannot be run\n  \
        127    that program is not there\n  \
        128+N  signal N ended that program; 143 if its time was over\n  \
        130    interrupted\n\n\
        With --json a failure is an object on stdout: error, and causes, code, hint and\n\
        request_id where there are any. A variable FORKD_… that is empty counts as not set.\n\
        Colour is off when NO_COLOR is set or the output is not a terminal."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// All that can be typed. A variable that is empty counts as not set.
pub fn command() -> clap::Command {
    without_empty(Cli::command())
}

fn without_empty(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| {
            let value = arg.get_env().and_then(std::env::var_os);
            if value.is_some_and(|value| value.is_empty()) {
                arg.env(None::<&'static str>)
            } else {
                arg
            }
        })
        .mut_subcommands(without_empty)
}

/// Whether `--json` was typed, after whichever subcommand.
pub fn wants_json(matches: &ArgMatches) -> bool {
    let here = matches.try_get_one::<bool>("json");
    here.is_ok_and(|json| json == Some(&true))
        || matches
            .subcommand()
            .is_some_and(|(_, below)| wants_json(below))
}

impl Command {
    /// Its exit code is that of a program somewhere else.
    pub fn passes_code_on(&self) -> bool {
        use machine::MachineCommand;
        match self {
            Self::Exec(_) | Self::Run(_) | Self::Shell(_) => true,
            Self::Machine(args) => {
                matches!(
                    args.command,
                    MachineCommand::Exec(_) | MachineCommand::Shell(_)
                )
            }
            _ => false,
        }
    }
}

/// A word of the form `KEY=VALUE`.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("KEY=VALUE is needed".to_owned()),
    }
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
    /// Start children of a snapshot or of a running sandbox
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
    /// Let every owner use a snapshot, or its own only
    SnapshotShare(SnapshotShareArgs),
    /// Say what snapshots take on disk, or look for damage
    Store(StoreArgs),
    /// Sandboxes with a name that can be put to sleep
    Workspace(WorkspaceArgs),
    /// Make, list and revoke tokens
    Token(TokenArgs),
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
