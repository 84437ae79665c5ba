//! Arguments of `forkd man`.

use std::path::PathBuf;

use clap::Args;

/// Arguments of `forkd man`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd man | man -l -                read it\n  \
    forkd man --out /usr/share/man/man1   write forkd.1 and one page per subcommand")]
pub struct ManArgs {
    /// Write all pages, subcommands included, into this directory instead of printing one
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}
