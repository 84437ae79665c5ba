//! Arguments of the commands that act inside a sandbox.

use clap::Args;
use forkd_types::MiB;

use super::{
    DEFAULT_IMAGE, DaemonArgs, LimitArgs, NetworkArgs, PullArgs, VolumeArgs, pair, variable,
};

/// How a command runs in the guest: `exec` and `run` share these.
#[derive(Debug, Clone, Default, Args)]
pub struct ProcessArgs {
    /// Pass standard input to the command, and let it run without a timeout
    #[arg(short, long, conflicts_with_all = ["json", "timeout_secs"])]
    pub interactive: bool,
    /// Give the command a terminal; implies --interactive
    #[arg(short, long, conflicts_with_all = ["json", "timeout_secs"])]
    pub tty: bool,
    /// Set a variable, or pass one of this environment on: KEY=VALUE or KEY; repeatable
    #[arg(short, long = "env", value_name = "KEY[=VALUE]", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Working directory in the sandbox
    #[arg(short, long, visible_alias = "cwd", value_name = "DIR")]
    pub workdir: Option<String>,
    /// User in the sandbox: a name or a number
    #[arg(short, long)]
    pub user: Option<String>,
}

/// Arguments of `forkd exec`.
#[derive(Debug, Args)]
#[command(
    after_help = "The exit code is that of the command, or 125 if forkd failed before or while running it.\n\nExamples:\n  \
    forkd exec sb-… -- uname -a                     run a command, print its output as it comes\n  \
    echo hello | forkd exec -i sb-… -- tr a-z A-Z   give it input\n  \
    forkd exec -t sb-… -- top                       give it a terminal\n  \
    forkd exec -e TOKEN -w /srv -u nobody sb-… -- ./check"
)]
pub struct ExecArgs {
    /// ID of the sandbox
    pub id: String,
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Kill the command after this many seconds
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub timeout_secs: u64,
    /// Print output and exit code as JSON when the command has ended
    #[arg(long)]
    pub json: bool,
    /// Program and arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd eval`.
#[derive(Debug, Args)]
#[command(
    after_help = "The interpreter was warmed up in the parent. It keeps what the code defines.\n\nExamples:\n  \
    forkd eval sb-… -- 'np.zeros(5).tolist()'\n  \
    forkd eval sb-… -- 'total = 41'; forkd eval sb-… -- 'total + 1'"
)]
pub struct EvalArgs {
    /// ID of the sandbox
    pub id: String,
    /// Interrupt the code after this many seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub timeout_secs: Option<u64>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Python code; words are joined by spaces
    #[arg(last = true, required = true, value_name = "CODE")]
    pub code: Vec<String>,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd ping`.
#[derive(Debug, Args)]
pub struct PingArgs {
    /// ID of the sandbox
    pub id: String,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd shell`.
#[derive(Debug, Args)]
#[command(
    after_help = "The exit code is that of the shell, or 125 if forkd failed before or while running it.\n\nExamples:\n  \
    forkd shell sb-…                    the login shell of root\n  \
    forkd shell --user nobody sb-…\n  \
    forkd shell sb-… -- python3         another program on a terminal"
)]
pub struct ShellArgs {
    /// ID of the sandbox
    pub id: String,
    /// User in the sandbox: a name or a number
    #[arg(short, long)]
    pub user: Option<String>,
    /// Program and arguments instead of the login shell
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd cp`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd cp notes.txt sb-…:/root/notes.txt   copy into a sandbox\n  \
    forkd cp sb-…:/etc/os-release -           print a file of a sandbox\n\n\
    The target gets its name when the whole file has arrived.")]
pub struct CpArgs {
    /// Source: a local file, ID:/PATH, or - for standard input
    pub from: String,
    /// Target: a local file, ID:/PATH, or - for standard output
    pub to: String,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd run`.
#[derive(Debug, Args)]
#[command(
    after_help = "The first run of an image boots a parent, warms it up and freezes it as a snapshot. Later\n\
    runs fork that snapshot. Each combination of --vcpus and --memory has a snapshot of its own.\n\
    The exit code is that of the command, or 125 if forkd failed before or while running it.\n\nExamples:\n  \
    forkd run -- python3 -c 'import numpy; print(numpy.zeros(5).tolist())'\n  \
    forkd run python:3-slim -- python3 -V           a container image\n  \
    forkd run --vcpus 2 --memory 1G -- nproc        a larger machine\n  \
    echo hello | forkd run -i -- tr a-z A-Z         give the command input\n  \
    forkd run -it                                   a shell in a new sandbox\n  \
    forkd run --net public -- pip install six       reach every public address
  \
    forkd run -e HOME=/tmp -w /tmp -u nobody -- id  environment, directory, user\n  \
    forkd run --keep --label of=me -- make          keep the sandbox, to look at it later"
)]
pub struct RunArgs {
    /// The image: NAME:TAG in a registry, another source (see `forkd image --help`), or the name of an
    /// installed image or recipe
    #[arg(value_name = "IMAGE", conflicts_with = "image")]
    pub from: Option<String>,
    /// The image, in the form of an option
    #[arg(long, default_value = DEFAULT_IMAGE, value_name = "IMAGE")]
    pub image: String,
    #[command(flatten)]
    pub pull: PullArgs,
    /// Number of vCPUs [default: that of the image]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=32))]
    pub vcpus: Option<u8>,
    /// Guest memory, such as 512M or 2G [default: that of the image]
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<MiB>,
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Kill the command after this many seconds
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub timeout_secs: u64,
    /// Keep the sandbox after the command has ended, and print its ID
    #[arg(long)]
    pub keep: bool,
    /// Delete the sandbox after the command has ended: the default
    #[arg(long, conflicts_with = "keep")]
    pub rm: bool,
    /// Put a label on the sandbox; repeatable
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Print output and exit code as JSON when the command has ended
    #[arg(long)]
    pub json: bool,
    /// Program and arguments; with --tty the login shell if left out
    #[arg(last = true, required_unless_present = "tty", value_name = "COMMAND")]
    pub command: Vec<String>,
    #[command(flatten)]
    pub volumes: VolumeArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
