//! What each subcommand does. One file per subcommand, each with a `run`.

mod completions;
mod machine;
mod man;
mod r#where;

use crate::args::{Cli, Command};
use crate::error::CliResult;
use crate::ui::Ui;

/// Runs what was asked for.
pub fn run(cli: Cli, ui: &Ui) -> CliResult {
    match cli.command {
        Command::Machine(args) => machine::run(args, ui),
        Command::Where(args) => r#where::run(&args, ui),
        Command::Completions(args) => completions::run(&args, ui),
        Command::Man(args) => man::run(&args, ui),
    }
}
