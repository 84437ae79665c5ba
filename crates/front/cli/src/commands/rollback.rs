//! `forkd rollback`: returns a sandbox to a checkpoint.

use forkd_api::RollbackRequest;

use crate::args::RollbackArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd rollback`.
pub fn run(args: RollbackArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let request = RollbackRequest { to: args.to };
        let done = client.rollback(&args.id, &request).await.map_err(failed)?;
        if args.json {
            ui.json(&done)?;
        } else {
            ui.aside(format_args!(
                "{} pages restored in {:.1} ms; the agent answered after {:.1} ms",
                done.pages,
                done.pause_us as f64 / 1000.0,
                done.ready_us as f64 / 1000.0
            ));
            ui.line(format_args!("back at {}", done.to))?;
        }
        Ok(Exit::OK)
    })
}
