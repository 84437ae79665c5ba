//! Arguments of `forkd machine`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use forkd_machine::{AccelChoice, Clock, MachineName};
use forkd_types::MiB;

use super::pair;

/// Arguments of `forkd machine`.
#[derive(Debug, Args)]
#[command(
    long_about = "A managed Debian VM in which KVM works, for hosts without it.\n\n\
        The machine uses hardware acceleration where the host's KVM is native and can nest, and software \
        emulation elsewhere. Its data disk is kept until `rm`; everything else in it is new at each \
        start. The programs of this build are copied into it whenever they change.",
    after_help = "Examples:\n  \
        forkd machine start                        start the machine, or check that it runs\n  \
        forkd machine exec -- ls -l /dev/kvm       run a command in the machine\n  \
        forkd machine shell                        open a shell in it\n  \
        forkd machine stop                         stop it, keep its data"
)]
pub struct MachineArgs {
    #[command(subcommand)]
    pub command: MachineCommand,
}

/// Subcommands of `forkd machine`.
#[derive(Debug, Subcommand)]
pub enum MachineCommand {
    /// Start the machine, or check that it runs
    Start(StartArgs),
    /// Stop the machine; its data disk is kept
    Stop(StopArgs),
    /// Show the state of the machine
    Status(StatusArgs),
    /// List machines and their states
    Ls(LsArgs),
    /// Run a command in the machine
    Exec(ExecArgs),
    /// Open a shell in the machine
    Shell(ShellArgs),
    /// Copy changed programs of this build into the machine
    Sync(SyncArgs),
    /// Copy files into the machine or out of it
    Cp(CpArgs),
    /// Print the console output of the machine
    Logs(LogsArgs),
    /// Delete the machine and its data
    Rm(RmArgs),
}

/// Selects a machine.
#[derive(Debug, Clone, Args)]
pub struct NameArg {
    /// Name of the machine
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
    forkd machine start --port 0 --name second    a second one, on a free port\n  \
    forkd machine start --clock instructions      one whose time is executed instructions\n\n\
    With --clock instructions each executed instruction takes 2 ns, so the same work takes the same time\n\
    whatever the load of this host. Such a machine is emulated with one CPU, and its timers expire every 4 ms only.\n\
    It serves measurements.\n\n\
    A machine that runs is left as it is. FORKD_QEMU names a QEMU outside of PATH, and\n\
    FORKD_MACHINE_IMAGE a folder with an image to use instead of building one.")]
pub struct StartArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Number of CPUs [default: that of the host, 2 to 8; 1 under emulation, where more are unreliable]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=255))]
    pub cpus: Option<u32>,
    /// Memory, such as 4G [default: half of the host's memory, 2G to 8G]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<MiB>,
    /// Size of the data disk, such as 50G; sparse, and can grow later [default: 20G]
    #[arg(long, value_name = "SIZE")]
    pub disk: Option<MiB>,
    /// Acceleration: auto, kvm or tcg
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub accel: AccelChoice,
    /// Clock of the machine: host, or instructions for measurements [default: host]
    #[arg(long, value_name = "CLOCK")]
    pub clock: Option<Clock>,
    /// Port of 127.0.0.1 that is forwarded to the daemon in the machine; 0 picks a free one [default: 8889]
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
#[command(after_help = "The exit code is 0 if the machine runs and answers, else 1.")]
pub struct StatusArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Print the state as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine exec`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd machine exec -- sh -c 'dmesg | grep -i svm'\n  \
    tar c . | forkd machine exec -- tar x -C /tmp\n\n\
    Input and output are streamed, and Ctrl-C is passed on. The exit code is that of the command, 128+N\n\
    if signal N ended it, or 125 if forkd failed before or while running it.")]
pub struct ExecArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Set a variable in the environment of the command; repeatable
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
    /// Working directory in the machine
    #[arg(long, short = 'C', value_name = "DIR")]
    pub cwd: Option<String>,
    /// User in the machine
    #[arg(long, short, value_name = "USER")]
    pub user: Option<String>,
    /// Give the command a terminal
    #[arg(long, short)]
    pub tty: bool,
    /// Do not copy changed programs of this build first
    #[arg(long)]
    pub no_sync: bool,
    /// Program and arguments
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
    /// Print the names of the copied programs as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine cp`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd machine cp ./test.bin :/tmp/                        into the machine\n  \
    forkd machine cp :/var/log/forkd-controller.log ./log     out of it\n\n\
    A path with a leading colon is in the machine. Directories are copied recursively.")]
pub struct CpArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Source; a leading colon means a path in the machine
    pub from: String,
    /// Target; a leading colon means a path in the machine
    pub to: String,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `forkd machine logs`.
#[derive(Debug, Args)]
pub struct LogsArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Keep printing new output
    #[arg(long, short)]
    pub follow: bool,
    /// Print only the path of the log file
    #[arg(long, conflicts_with = "follow")]
    pub path: bool,
}

/// Arguments of `forkd machine rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    #[command(flatten)]
    pub machine: NameArg,
    /// Do not ask, and stop the machine if it runs
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
    /// Parses a path; a leading colon means a path in the machine.
    pub fn parse(text: &str) -> Self {
        match text.strip_prefix(':') {
            Some(path) => Self::Machine(path.to_owned()),
            None => Self::Host(text.into()),
        }
    }
}
