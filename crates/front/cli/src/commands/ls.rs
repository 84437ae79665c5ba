//! `forkd ls`: lists live sandboxes.

use crate::args::LsArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::table::{age, table};
use crate::ui::Ui;

/// Runs `forkd ls`.
pub fn run(args: &LsArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let all = client.sandboxes().await.map_err(failed)?;
        if args.json {
            ui.json(&all)?;
        } else if args.quiet {
            for sandbox in &all {
                ui.line(&sandbox.id)?;
            }
        } else if all.is_empty() {
            ui.aside("no live sandboxes");
        } else {
            let rows = all.iter().map(|sandbox| {
                [
                    sandbox.id.clone(),
                    sandbox.snapshot_tag.clone(),
                    format!("{:?}", sandbox.state).to_lowercase(),
                    sandbox
                        .pid
                        .map_or_else(|| "-".into(), |pid| pid.to_string()),
                    sandbox.network.mode.clone(),
                    sandbox.branch_count.to_string(),
                    age(sandbox.created_at_unix),
                ]
            });
            ui.line(table(
                [
                    "ID", "SNAPSHOT", "STATE", "PID", "NETWORK", "BRANCHES", "AGE",
                ],
                rows,
            ))?;
        }
        Ok(Exit::OK)
    })
}
