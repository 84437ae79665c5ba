//! `forkd logs`: prints the console of a sandbox.

use std::io::IsTerminal;

use crate::args::LogsArgs;
use crate::console;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd logs`.
pub fn run(args: &LogsArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let bytes = client.logs(&args.id, args.tail).await.map_err(failed)?;
        if bytes.is_empty() {
            ui.aside("the sandbox has written nothing to its console since it started");
        }
        if args.raw || !std::io::stdout().is_terminal() {
            ui.raw(&bytes)?;
        } else {
            ui.raw(console::printable(&bytes).as_bytes())?;
        }
        Ok(Exit::OK)
    })
}
