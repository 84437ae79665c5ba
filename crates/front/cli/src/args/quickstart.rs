//! Arguments of `forkd quickstart`.

use clap::Args;

use super::{DEFAULT_IMAGE, DaemonArgs};

/// Arguments of `forkd quickstart`.
#[derive(Debug, Args)]
pub struct QuickstartArgs {
    /// Number of children
    #[arg(short, long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub n: u32,
    /// Image to boot the parent from
    #[arg(long, default_value = DEFAULT_IMAGE)]
    pub image: String,
    /// Accepted for compatibility; the command asks no questions
    #[arg(short, long, hide = true)]
    pub yes: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
