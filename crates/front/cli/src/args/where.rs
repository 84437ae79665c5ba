//! Arguments of `forkd where`.

use clap::Args;

/// Arguments of `forkd where`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd where            the data directory, one line\n  \
    forkd where --json     data, cache and state directories")]
pub struct WhereArgs {
    /// Print all directories as JSON
    #[arg(long)]
    pub json: bool,
}
