//! `forkd`: the command line.
//!
//! `args/` says what can be typed, with a file for each group of subcommands; `commands/` what is done about it, with a
//! file for each subcommand. A command prints data to stdout and talk to stderr through [`ui::Ui`], and fails with
//! [`error::CliError`], which `main` prints once.

mod args;
mod commands;
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
