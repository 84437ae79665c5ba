//! `forkd snapshot-share`: who may start children from a snapshot.

use forkd_api::UpdateSnapshot;

use crate::args::SnapshotShareArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd snapshot-share`.
pub fn run(args: &SnapshotShareArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let request = UpdateSnapshot {
            public: Some(!args.private),
        };
        let detail = client
            .update_snapshot(&args.tag, &request)
            .await
            .map_err(failed)?;
        if args.json {
            ui.json(&detail)?;
        } else {
            let who = if args.private {
                "its owner"
            } else {
                "everyone"
            };
            ui.line(format!("✓ {} can be used by {who}", detail.tag))?;
        }
        Ok(Exit::OK)
    })
}
