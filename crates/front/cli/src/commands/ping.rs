//! `forkd ping`: checks that the agent of a sandbox answers.

use crate::args::PingArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd ping`.
pub fn run(args: &PingArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        ui.json(&client.ping(&args.id).await.map_err(failed)?)?;
        Ok(Exit::OK)
    })
}
