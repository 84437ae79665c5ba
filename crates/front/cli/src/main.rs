//! `forkd`: the command line.
//!
//! `args/` says what can be typed, `commands/` what is done about it: one file per subcommand in
//! both. A command prints data to stdout and talk to stderr through [`ui::Ui`], and fails with
//! [`error::CliError`], which `main` prints once.

mod args;
mod commands;
mod daemon;
mod error;
mod outcome;
mod table;
mod ui;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = args::Cli::parse();
    let ui = ui::Ui::from_env();
    match commands::run(cli, &ui) {
        Ok(exit) => exit.into(),
        Err(error) => error.report(&ui).into(),
    }
}
