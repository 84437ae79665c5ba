//! `forkd branch`: freezes a running sandbox as a snapshot.

use forkd_api::{BranchMode, BranchRequest, SnapshotInfo};

use crate::args::BranchArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd branch`.
pub fn run(args: BranchArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    let request = BranchRequest {
        tag: args.tag,
        mode: Some(if args.full {
            BranchMode::Full
        } else {
            BranchMode::Live
        }),
        wait: !args.no_wait,
        freeze: args.freeze,
        ..BranchRequest::default()
    };
    block_on(async {
        let made = client.branch(&args.id, &request).await.map_err(failed)?;
        show(&made, args.json, ui)?;
        Ok(Exit::OK)
    })
}

/// Prints a new snapshot.
pub fn show(made: &SnapshotInfo, json: bool, ui: &Ui) -> std::io::Result<()> {
    if json {
        return ui.json(made);
    }
    if let Some(us) = made.pause_us {
        ui.aside(format_args!(
            "branch ready; the sandbox was paused for {:.1} ms",
            us as f64 / 1000.0
        ));
    }
    ui.line(format_args!("tag: {}", made.tag))?;
    ui.line(format_args!("dir: {}", made.dir))?;
    if let Some(source) = &made.branched_from {
        ui.line(format_args!("branched_from: {source}"))?;
    }
    if let Some(warning) = &made.warning {
        ui.talk(format_args!("warning: {warning}"));
    }
    Ok(())
}
