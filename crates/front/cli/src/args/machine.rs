//! `forkd machine`

use std::path::PathBuf;

use clap::{Args, Subcommand};
use forkd_machine::{AccelChoice, MachineName};
use forkd_types::MiB;

use super::pair;

/// Arguments of `forkd machine`.
#[derive(Debug, Args)]
#[command(
    long_about = "A managed Debian VM in which KVM works, for hosts that have none.\n\n\
        It uses hardware acceleration where the host's KVM is native and can nest, and software \
        emulation elsewhere. Its data disk is kept until `rm`; everything else in it is new at each \
        start. The programs of this build are copied in, and again whenever they change.",
    after_help = "Examples:\n  \
        forkd machine start                        start it, or see that it runs\n  \
        forkd machine exec -- ls -l /dev/kvm       run a command in it\n  \
        forkd machine shell                        look around\n  \
        forkd machine stop                         stop it, keep its data"
)]
pub struct MachineArgs {
    #[command(subcommand)]
    pub command: MachineCommand,
}

/// What can be done with a machine.
#[derive(Debug, Subcommand)]
pub enum MachineCommand {
    /// Start the machine, or see that it runs
    Start(StartArgs),
    /// Stop the machine; its data disk is kept
    Stop(StopArgs),
    /// Show what the machine is doing
    Status(StatusArgs),
    /// List the machines
    Ls(LsArgs),
    /// Run a command in the machine
    Exec(ExecArgs),
    /// Open a shell in the machine
    Shell(ShellArgs),
    /// Copy the programs of this build into the machine, where they differ
    Sync(SyncArgs),
    /// Copy files into the machine or out of it
    Cp(CpArgs),
    /// Print what the machine's console printed
    Logs(LogsArgs),
    /// Remove the machine and its data
    Rm(RmArgs),
}

/// Which machine.
#[derive(Debug, Clone, Args)]
pub struct NameArg {
    /// Which machine
    #[arg(
        long,
        value_name = "NAME",
        default_value = "default",
        env = "FORKD_MACHINE"
    )]
    pub name: MachineName,
}

/// Arguments of `forkd machine start`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd machine start --cpus 4 --memory 8G\n  \
    forkd machine start --port 0 --name second    a second one, on a free port\n\n\
    A machine that runs is left as it is. FORKD_QEMU names a QEMU outside of PATH, and\n\
    FORKD_MACHINE_IMAGE a folder with an image to use instead of building one.")]
pub struct StartArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Processors [default: those of the host, 2 to 8; 1 under emulation, where more are not reliable]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=255))]
    pub cpus: Option<u32>,
    /// Memory, such as 4G [default: half of the host's, 2G to 8G]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<MiB>,
    /// Size of the data disk, such as 50G; it takes what is used, and can grow later [default: 20G]
    #[arg(long, value_name = "SIZE")]
    pub disk: Option<MiB>,
    /// Acceleration: auto, kvm or tcg
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub accel: AccelChoice,
    /// Port of 127.0.0.1 that leads to the daemon inside; 0 picks a free one [default: 8889]
    #[arg(long, value_name = "PORT")]
    pub port: Option<u16>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine stop`.
#[derive(Debug, Args)]
pub struct StopArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine status`.
#[derive(Debug, Args)]
#[command(after_help = "Exit codes: 0 when the machine runs and answers, 1 when it does not.")]
pub struct StatusArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Print them as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine exec`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd machine exec -- sh -c 'dmesg | grep -i svm'\n  \
    tar c . | forkd machine exec -- tar x -C /tmp\n\n\
    Input and output are streamed; the exit code is the command's own, 128 and the number of the\n\
    signal that ended it, or 125 if forkd itself failed. Ctrl-C is passed on.")]
pub struct ExecArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Set a variable of the environment
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
    /// Run in this directory
    #[arg(long, short = 'C', value_name = "DIR")]
    pub cwd: Option<String>,
    /// Run as this user
    #[arg(long, short, value_name = "USER")]
    pub user: Option<String>,
    /// Give the command a terminal
    #[arg(long, short)]
    pub tty: bool,
    /// Do not look whether the programs of this build have changed
    #[arg(long)]
    pub no_sync: bool,
    /// The command and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    pub command: Vec<String>,
}

/// Arguments of `forkd machine shell`.
#[derive(Debug, Args)]
pub struct ShellArgs {
    #[command(flatten)]
    pub machine: NameArg,
}

/// Arguments of `forkd machine sync`.
#[derive(Debug, Args)]
pub struct SyncArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Print the names of what was copied as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine cp`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd machine cp ./test.bin :/tmp/                        into the machine\n  \
    forkd machine cp :/var/log/forkd-controller.log ./log     out of it\n\n\
    A path with a colon in front is one in the machine. Folders are copied with what is in them.")]
pub struct CpArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// What to copy; a colon in front means in the machine
    pub from: String,
    /// Where to; a colon in front means in the machine
    pub to: String,
    /// Print what was copied as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Go on printing what comes
    #[arg(long, short)]
    pub follow: bool,
    /// Print only the file's path
    #[arg(long, conflicts_with = "follow")]
    pub path: bool,
}

/// Arguments of `forkd machine rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Do not ask, and stop it if it runs
    #[arg(long, short)]
    pub force: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// One end of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyEnd {
    /// A path of the host.
    Host(PathBuf),
    /// A path in the machine.
    Machine(String),
}

impl CopyEnd {
    /// Reads a path; a colon in front means in the machine.
    pub fn parse(text: &str) -> Self {
        match text.strip_prefix(':') {
            Some(path) => Self::Machine(path.to_owned()),
            None => Self::Host(text.into()),
        }
    }
}
