//! `forkd snapshot-compact`: copies a snapshot into one that depends on no parent.

use super::branch::show;
use crate::args::SnapshotCompactArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd snapshot-compact`.
pub fn run(args: &SnapshotCompactArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let made = client.compact(&args.from, &args.to).await.map_err(failed)?;
        show(&made, args.json, ui)?;
        Ok(Exit::OK)
    })
}
