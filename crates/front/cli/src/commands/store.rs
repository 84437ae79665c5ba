//! `forkd store`: shows disk usage, or checks for damage.

use forkd_api::{FsckReport, StoreUsage};

use crate::args::StoreArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::table::{bytes, facts};
use crate::ui::Ui;

/// Runs `forkd store`.
pub fn run(args: &StoreArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        if !args.check {
            let usage = client.store().await.map_err(failed)?;
            if args.json {
                ui.json(&usage)?;
            } else {
                ui.line(described(&usage))?;
            }
            return Ok(Exit::OK);
        }
        if args.deep {
            ui.aside("reading every blob …");
        }
        let report = client.fsck(args.deep).await.map_err(failed)?;
        if args.json {
            ui.json(&report)?;
        } else {
            say(&report, ui)?;
        }
        Ok(if report.problems.is_empty() {
            Exit::OK
        } else {
            Exit::FAILURE
        })
    })
}

fn described(usage: &StoreUsage) -> String {
    let limit = usage.limit_bytes.map_or_else(|| "none".to_owned(), bytes);
    facts([
        ("dir", usage.dir.clone()),
        ("snapshots", usage.snapshots.to_string()),
        ("files", usage.blobs.to_string()),
        ("on disk", bytes(usage.physical_bytes)),
        ("limit", limit),
        ("logical", bytes(usage.logical_bytes)),
        ("free", bytes(usage.free_bytes)),
    ])
}

fn say(report: &FsckReport, ui: &Ui) -> std::io::Result<()> {
    for problem in &report.problems {
        ui.line(format_args!("✗ {problem}"))?;
    }
    for repaired in &report.repaired {
        ui.line(format_args!("✓ {repaired}"))?;
    }
    ui.line(format_args!(
        "{} snapshots and {} files checked, {} problems",
        report.snapshots,
        report.blobs_checked,
        report.problems.len()
    ))
}
