//! `forkd completions`: prints a completion script generated from the argument types.

use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd completions`.
pub fn run(args: &CompletionsArgs, ui: &Ui) -> CliResult {
    // Through a buffer: the generator panics when the reader closes the pipe early.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "forkd", &mut script);
    ui.raw(&script)?;
    Ok(Exit::OK)
}
