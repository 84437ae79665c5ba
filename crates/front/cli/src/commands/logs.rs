//! `forkd logs`: the console of a sandbox.

use crate::args::LogsArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd logs`.
pub fn run(args: &LogsArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        ui.raw(&client.logs(&args.id, args.tail).await.map_err(failed)?)?;
        Ok(Exit::OK)
    })
}
