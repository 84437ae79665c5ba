//! Commands that do something inside a sandbox.

use clap::Args;

use super::{DEFAULT_IMAGE, DaemonArgs, pair};

/// Arguments of `forkd exec`.
#[derive(Debug, Args)]
#[command(
    after_help = "The exit code is that of the command, 125 if forkd itself failed.\n\nExamples:\n  \
    forkd exec sb-… -- uname -a\n  \
    echo hello | forkd exec -i sb-… -- tr a-z A-Z"
)]
pub struct ExecArgs {
    /// The sandbox
    pub id: String,
    /// Pass standard input on, without a limit on its time
    #[arg(short, long, conflicts_with_all = ["json", "timeout_secs"])]
    pub interactive: bool,
    /// Kill it after this many seconds
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub timeout_secs: u64,
    /// Set a variable; may be given several times
    #[arg(short, long = "env", value_name = "KEY=VALUE", value_parser = pair)]
    pub env: Vec<(String, String)>,
    /// Where to run it
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<String>,
    /// As whom to run it
    #[arg(long)]
    pub user: Option<String>,
    /// Print JSON when it has ended
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Program and arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Arguments of `forkd eval`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  forkd eval sb-… -- 'np.zeros(5).tolist()'")]
pub struct EvalArgs {
    /// The sandbox
    pub id: String,
    /// Give it up after this many seconds [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub timeout_secs: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// The code; words are joined by spaces
    #[arg(last = true, required = true, value_name = "CODE")]
    pub code: Vec<String>,
}

/// Arguments of `forkd ping`.
#[derive(Debug, Args)]
pub struct PingArgs {
    /// The sandbox
    pub id: String,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd shell`.
#[derive(Debug, Args)]
#[command(after_help = "The exit code is that of the shell, 125 if forkd itself failed.")]
pub struct ShellArgs {
    /// The sandbox
    pub id: String,
    /// As whom to run it
    #[arg(long)]
    pub user: Option<String>,
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Another program than the shell
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Arguments of `forkd cp`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd cp notes.txt sb-…:/root/notes.txt\n  \
    forkd cp sb-…:/etc/os-release -")]
pub struct CpArgs {
    /// A file here, or ID:/PATH; - is standard input
    pub from: String,
    /// A file here, or ID:/PATH; - is standard output
    pub to: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Arguments of `forkd run`.
#[derive(Debug, Args)]
#[command(
    after_help = "The first run of an image builds a snapshot of it; later ones fork that.\n\
    The exit code is that of the command, 125 if forkd itself failed.\n\nExamples:\n  \
    forkd run --image python-numpy -- python3 -c 'import numpy; print(numpy.zeros(5).tolist())'"
)]
pub struct RunArgs {
    /// The image
    #[arg(long, default_value = DEFAULT_IMAGE)]
    pub image: String,
    /// Kill it after this many seconds
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub timeout_secs: u64,
    /// Print JSON when it has ended
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
    /// Program and arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}
