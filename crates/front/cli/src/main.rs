//! `forkd`: the command line.
//!
//! `args/` parses, with one file per group of subcommands. `commands/` acts, with one file per subcommand. A command prints
//! data to stdout and everything else to stderr through [`ui::Ui`]. It fails with [`error::CliError`], which `main` prints
//! once.

mod args;
mod commands;
mod console;
mod daemon;
mod error;
mod outcome;
mod signals;
mod table;
mod terminal;
mod ui;

use std::process::ExitCode;

use clap::FromArgMatches;

fn main() -> ExitCode {
    let matches = args::command().get_matches();
    let cli = args::Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let ui = ui::Ui::from_env(args::wants_json(&matches));
    match commands::run(cli, &ui) {
        Ok(exit) => exit.into(),
        Err(error) => error.report(&ui).into(),
    }
}
