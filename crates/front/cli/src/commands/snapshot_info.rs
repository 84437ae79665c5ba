//! `forkd snapshot-info`: describes a snapshot.

use crate::args::SnapshotInfoArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::table::{bytes, facts};
use crate::ui::Ui;

/// Runs `forkd snapshot-info`.
pub fn run(args: &SnapshotInfoArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let found = client.snapshot(&args.tag).await.map_err(failed)?;
        if args.json {
            ui.json(&found)?;
            return Ok(Exit::OK);
        }
        let none = || "-".to_owned();
        let list = |names: &[String]| {
            if names.is_empty() {
                none()
            } else {
                names.join(", ")
            }
        };
        ui.line(facts([
            ("tag", found.tag.clone()),
            ("dir", found.dir.clone()),
            ("image", found.image.clone().unwrap_or_else(none)),
            (
                "vcpus",
                found.vcpus.map_or_else(none, |count| count.to_string()),
            ),
            ("memory", bytes(found.memory_logical_bytes)),
            ("memory on disk", bytes(found.memory_physical_bytes)),
            (
                "disk layers",
                format!(
                    "{} ({})",
                    found.disk_layers,
                    bytes(found.disk_physical_bytes)
                ),
            ),
            ("vmstate", bytes(found.vmstate_bytes)),
            ("unique", bytes(found.unique_bytes)),
            ("chain depth", found.chain_depth.to_string()),
            ("parent", found.parent_tag.clone().unwrap_or_else(none)),
            ("hash", found.content_hash.clone().unwrap_or_else(none)),
            ("ancestors", list(&found.ancestors)),
            ("dependents", list(&found.dependents)),
        ]))?;
        Ok(Exit::OK)
    })
}
