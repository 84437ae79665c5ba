//! The command line as clap parses it: one file per group of subcommands.
//!
//! Doc comments of the arguments are the text of `--help`. These types hold no behaviour beyond parsing.

mod bench;
mod build;
mod completions;
mod daemon;
mod doctor;
mod guest;
mod hub;
mod image;
mod limits;
pub mod machine;
mod man;
mod mcp;
mod network;
mod node;
mod parent;
mod ports;
mod quickstart;
mod sandbox;
mod secret;
mod snapshot;
mod token;
mod r#where;
mod workspace;

use clap::{ArgMatches, CommandFactory, Parser, Subcommand};

pub use bench::BenchArgs;
pub use build::{BuildArgs, ExportArgs, SecretFrom, SecretSource};
pub use completions::CompletionsArgs;
pub use daemon::DaemonArgs;
pub use doctor::DoctorArgs;
pub use guest::{CpArgs, EvalArgs, ExecArgs, PingArgs, ProcessArgs, RunArgs, ShellArgs};
pub use hub::{Memory, PackArgs, PackOptions, PushArgs, UnpackArgs};
pub use image::{FromImageArgs, ImageArgs, ImageCommand, PullArgs, PullWhen};
pub use limits::LimitArgs;
pub use machine::MachineArgs;
pub use man::ManArgs;
pub use mcp::{McpArgs, McpClient, McpCommand, McpInstallArgs, ToolArgs};
pub use network::{NetArgs, NetCommand, NetworkArgs, joined};
pub use node::{GatewayArgs, NodeArgs, NodeCommand};
pub use parent::{ParentArgs, ParentCommand};
pub use ports::{ForwardArgs, PortsArgs, PublishArgs};
pub use quickstart::QuickstartArgs;
pub use sandbox::{
    BranchArgs, CheckpointArgs, CleanupArgs, ForkArgs, KillArgs, LimitsArgs, LogsArgs, LsArgs,
    RollbackArgs, SpawnArgs, TopArgs,
};
pub use secret::{SecretArgs, SecretCommand};
pub use snapshot::{
    ImagesArgs, RmiArgs, SnapshotArgs, SnapshotCompactArgs, SnapshotDiffArgs, SnapshotInfoArgs,
    SnapshotShareArgs, StoreArgs,
};
pub use token::{TokenArgs, TokenCommand};
pub use r#where::WhereArgs;
pub use workspace::{WorkspaceArgs, WorkspaceCommand};

/// The image of `run` and `quickstart` without `--image`.
pub const DEFAULT_IMAGE: &str = "python-numpy";

/// fork(2) for machines: start microVMs copy-on-write from a warm parent.
#[derive(Debug, Parser)]
#[command(
    name = "forkd",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    arg_required_else_help = true,
    after_help = "Examples:\n  \
        forkd run -- echo hello                          run a command in a new sandbox\n  \
        forkd snapshot --tag py --image python-numpy     boot a parent, warm it up, freeze it\n  \
        forkd spawn --tag py -n 10                       fork ten children from it\n  \
        forkd exec ID -- uname -a                        run a command in one of them\n\n\
        Exit codes:\n  \
        0      success\n  \
        1      failure\n  \
        2      invalid usage\n  \
        125    forkd failed before or while running the command of exec, run, shell, machine exec\n         \
               or machine shell\n  \
        126    that command is not executable\n  \
        127    that command was not found\n  \
        128+N  that command was ended by signal N; 143 after a timeout\n  \
        130    interrupted\n\n\
        With --json a failure is an object on stdout: error, and causes, code, hint and request_id\n\
        where they exist. An empty FORKD_… variable counts as not set. Colour is off when NO_COLOR is\n\
        set or the output is not a terminal."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// The whole command line. An empty variable of the environment counts as not set.
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

/// Whether `--json` was given to the subcommand, at any depth.
pub fn wants_json(matches: &ArgMatches) -> bool {
    let here = matches.try_get_one::<bool>("json");
    here.is_ok_and(|json| json == Some(&true))
        || matches
            .subcommand()
            .is_some_and(|(_, below)| wants_json(below))
}

impl Command {
    /// Whether the exit code is that of a program in a sandbox or in the machine.
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

/// Parses an argument of the form `KEY=VALUE`.
fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE".to_owned()),
    }
}

/// Parses `KEY=VALUE`, or `KEY` for a variable of this process's environment.
fn variable(text: &str) -> Result<(String, String), String> {
    if text.is_empty() || text.contains('=') {
        return pair(text);
    }
    match std::env::var(text) {
        Ok(value) => Ok((text.to_owned(), value)),
        Err(std::env::VarError::NotPresent) => Err(format!(
            "variable {} is not set here: write KEY=VALUE",
            shortened(text)
        )),
        Err(std::env::VarError::NotUnicode(_)) => {
            Err(format!("variable {} is not UTF-8", shortened(text)))
        }
    }
}

/// The first 32 characters, for messages.
fn shortened(text: &str) -> String {
    text.chars().take(32).collect()
}

/// Every subcommand of `forkd`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what forkd does: freeze a warm parent, fork it, branch a child
    Quickstart(QuickstartArgs),
    /// Boot a parent, warm it up, and freeze it as a snapshot
    Snapshot(Box<SnapshotArgs>),
    /// Fork children from a snapshot, print timings, and delete them on exit
    Fork(ForkArgs),
    /// Fork children that stay, from a snapshot or from a running sandbox
    Spawn(SpawnArgs),
    /// Run a command in a new sandbox
    Run(Box<RunArgs>),
    /// Run a command in a sandbox
    Exec(ExecArgs),
    /// Evaluate Python code in the warm interpreter of a sandbox
    Eval(EvalArgs),
    /// Check that the agent of a sandbox answers
    Ping(PingArgs),
    /// Open a shell in a sandbox
    Shell(ShellArgs),
    /// Copy a file into or out of a sandbox
    Cp(CpArgs),
    /// Print the console output of a sandbox
    Logs(LogsArgs),
    /// List live sandboxes
    Ls(LsArgs),
    /// Show the memory, CPU time and disk traffic of live sandboxes
    Top(TopArgs),
    /// Show or change the limits of a live sandbox
    Limits(LimitsArgs),
    /// Delete sandboxes, running or failed
    Kill(KillArgs),
    /// Freeze a running sandbox as a snapshot while it goes on running
    Branch(BranchArgs),
    /// Keep the state of a running sandbox, to return to it later
    Checkpoint(CheckpointArgs),
    /// Return a sandbox to a checkpoint, in place
    Rollback(RollbackArgs),
    /// List snapshots, or with --images the images they are built from
    Images(ImagesArgs),
    /// Fetch, list, describe and remove images
    Image(Box<ImageArgs>),
    /// Build an image from a Dockerfile, step by step in a microVM
    Build(Box<BuildArgs>),
    /// Write an image as an OCI archive or layout
    Export(ExportArgs),
    /// Fetch a container image, boot a parent from it and freeze it as a snapshot
    FromImage(Box<FromImageArgs>),
    /// Build the disk of an image as a file, without a daemon
    Parent(ParentArgs),
    /// Delete snapshots by their tags
    Rmi(RmiArgs),
    /// Describe a snapshot
    SnapshotInfo(SnapshotInfoArgs),
    /// Run a command in a child of a snapshot and freeze the result as a new snapshot
    SnapshotDiff(SnapshotDiffArgs),
    /// Copy a snapshot into one that depends on no parent
    SnapshotCompact(SnapshotCompactArgs),
    /// Let every owner use a snapshot, or only its own
    SnapshotShare(SnapshotShareArgs),
    /// Pack a snapshot into a file, to share it
    Pack(PackArgs),
    /// Unpack a snapshot from a file
    Unpack(UnpackArgs),
    /// Push a snapshot to a folder, a registry or an object store
    Push(PushArgs),
    /// Pull a snapshot from a folder, a registry, an object store or a web server
    Pull(UnpackArgs),
    /// Show the disk usage of snapshots, or check them for damage
    Store(StoreArgs),
    /// Show and change the network of a sandbox
    Net(NetArgs),
    /// Show the ports of a sandbox, and set who may use them
    Ports(PortsArgs),
    /// Reach ports of a sandbox on local ports
    Forward(ForwardArgs),
    /// Manage named sandboxes that can be suspended
    Workspace(WorkspaceArgs),
    /// Set, list and delete secrets that requests of sandboxes get on their way out
    Secret(SecretArgs),
    /// Create, list and revoke tokens
    Token(TokenArgs),
    /// List and drain the hosts of a fleet
    Node(NodeArgs),
    /// Serve the API of many hosts at one address
    Gateway(GatewayArgs),
    /// Measure forks, branches and rollbacks on this host
    Bench(BenchArgs),
    /// Delete failed sandboxes and unusable snapshots
    Cleanup(CleanupArgs),
    /// Check this host and say how to fix what is wrong
    Doctor(DoctorArgs),
    /// Serve tools for models over the Model Context Protocol
    Mcp(Box<McpArgs>),
    /// Manage a VM in which KVM works, for hosts without it
    Machine(MachineArgs),
    /// Print where forkd keeps its files
    Where(WhereArgs),
    /// Print a completion script for a shell
    Completions(CompletionsArgs),
    /// Print the manual page
    Man(ManArgs),
}
