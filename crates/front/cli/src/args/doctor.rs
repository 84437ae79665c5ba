//! Arguments of `forkd doctor`.

use clap::Args;

use super::DaemonArgs;

/// Arguments of `forkd doctor`.
#[derive(Debug, Args)]
#[command(after_help = "The exit code is 1 if a check failed. A warning is not a failure.")]
pub struct DoctorArgs {
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
