//! `forkd quickstart`

use clap::Args;

use super::{DEFAULT_IMAGE, DaemonArgs};

/// Arguments of `forkd quickstart`.
#[derive(Debug, Args)]
pub struct QuickstartArgs {
    /// How many children
    #[arg(short, long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub n: u32,
    /// The image
    #[arg(long, default_value = DEFAULT_IMAGE)]
    pub image: String,
    /// Taken for compatibility: nothing is asked
    #[arg(short, long, hide = true)]
    pub yes: bool,
    #[command(flatten)]
    pub daemon: DaemonArgs,
}
