//! `forkd logs`: the console of a sandbox.

use crate::args::LogsArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd logs`.
pub fn run(args: &LogsArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let console = client.logs(&args.id, args.tail).await.map_err(failed)?;
        if console.is_empty() {
            ui.aside("nothing was written to the console since the sandbox started");
        }
        ui.raw(&console)?;
        Ok(Exit::OK)
    })
}
