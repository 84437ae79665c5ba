//! `forkd rmi`: the end of snapshots.

use crate::args::RmiArgs;
use crate::daemon::{block_on, connect};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd rmi`.
pub fn run(args: &RmiArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let mut exit = Exit::OK;
        for tag in &args.tags {
            match client.delete_snapshot(tag, args.cascade, args.force).await {
                Ok(()) => ui.line(format_args!("✓ {tag}"))?,
                Err(error) => {
                    ui.line(format_args!("✗ {tag} ({error})"))?;
                    if let Some(hint) = error.hint() {
                        ui.aside(hint);
                    }
                    exit = Exit::FAILURE;
                }
            }
        }
        Ok(exit)
    })
}
