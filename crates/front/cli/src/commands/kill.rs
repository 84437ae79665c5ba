//! `forkd kill`: the end of sandboxes.

use futures::StreamExt;

use crate::args::KillArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Requests that are under way at once.
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
        let results: Vec<_> = futures::stream::iter(ids)
            .map(|id| {
                let client = client.clone();
                async move {
                    let result = client.kill(&id).await;
                    (id, result)
                }
            })
            .buffered(PARALLEL)
            .collect()
            .await;
        let mut exit = Exit::OK;
        for (id, result) in results {
            match result {
                Ok(()) => ui.line(format_args!("✓ {id}"))?,
                Err(error) => {
                    ui.line(format_args!("✗ {id} ({error})"))?;
                    exit = Exit::FAILURE;
                }
            }
        }
        Ok(exit)
    })
}
