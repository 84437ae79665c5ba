//! `forkd images`: lists snapshots, or the images they are built from.

use crate::args::ImagesArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::table::{age, bytes, table};
use crate::ui::Ui;

/// Runs `forkd images`.
pub fn run(args: &ImagesArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        if args.images {
            let all = client.images().await.map_err(failed)?;
            if args.json {
                ui.json(&all)?;
            } else {
                let rows = all.iter().map(|image| {
                    [
                        image.name.clone(),
                        bytes(image.logical_bytes),
                        bytes(image.physical_bytes),
                    ]
                });
                ui.line(table(["IMAGE", "SIZE", "ON DISK"], rows))?;
            }
            return Ok(Exit::OK);
        }
        let mut all = client.snapshots().await.map_err(failed)?;
        all.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.created_at_unix));
        if args.json {
            ui.json(&all)?;
        } else if all.is_empty() {
            ui.aside(
                "no snapshots; create one with `forkd snapshot --tag NAME --image python-numpy`",
            );
        } else {
            let rows = all.iter().map(|snapshot| {
                [
                    snapshot.tag.clone(),
                    format!("{:?}", snapshot.status).to_lowercase(),
                    snapshot.physical_bytes.map_or_else(|| "-".into(), bytes),
                    snapshot
                        .memory_mib
                        .map_or_else(|| "-".into(), |mib| format!("{mib} MiB")),
                    snapshot.parent_tag.clone().unwrap_or_else(|| "-".into()),
                    age(snapshot.created_at_unix),
                    snapshot.image.clone().unwrap_or_else(|| "-".into()),
                ]
            });
            ui.line(table(
                [
                    "TAG", "STATUS", "SIZE", "MEMORY", "PARENT", "CREATED", "IMAGE",
                ],
                rows,
            ))?;
        }
        Ok(Exit::OK)
    })
}
