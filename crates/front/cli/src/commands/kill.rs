//! `forkd kill`: deletes sandboxes.

use futures::StreamExt;

use crate::args::KillArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::CliResult;
use crate::outcome::{self, Outcome};
use crate::ui::Ui;

/// Requests that run at the same time.
const PARALLEL: usize = 16;

/// Runs `forkd kill`.
pub fn run(args: KillArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let ids = if args.ids.is_empty() {
            let all = client.sandboxes().await.map_err(failed)?;
            all.into_iter()
                .filter(|sandbox| {
                    args.tag
                        .as_ref()
                        .is_none_or(|tag| *tag == sandbox.snapshot_tag)
                })
                .map(|sandbox| sandbox.id)
                .collect()
        } else {
            args.ids
        };
        if ids.is_empty() {
            ui.aside("no live sandboxes");
        }
        let outcomes: Vec<_> = futures::stream::iter(ids)
            .map(|id| {
                let client = client.clone();
                async move {
                    let result = client.kill(&id).await;
                    Outcome::new(id, result)
                }
            })
            .buffered(PARALLEL)
            .collect()
            .await;
        outcome::show(&outcomes, args.json, ui)
    })
}
