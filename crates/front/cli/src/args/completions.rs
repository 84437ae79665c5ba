//! Arguments of `forkd completions`.

use clap::Args;
use clap_complete::Shell;

/// Arguments of `forkd completions`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    forkd completions bash > ~/.local/share/bash-completion/completions/forkd\n  \
    forkd completions fish > ~/.config/fish/completions/forkd.fish")]
pub struct CompletionsArgs {
    /// Shell to print the script for
    pub shell: Shell,
}
