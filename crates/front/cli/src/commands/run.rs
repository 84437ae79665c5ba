//! `forkd run`: a command in a new sandbox of an image.

use forkd_api::{CreateSandboxes, ExecRequest};

use super::exec::{stream, whole};
use super::own_snapshot::OwnSnapshot;
use crate::args::RunArgs;
use crate::daemon::{block_on, connect};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd run`.
pub fn run(args: &RunArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let tag = format!("run-{}", args.image);
        let request = CreateSandboxes {
            snapshot_tag: tag.clone(),
            timeout_secs: Some(args.timeout_secs.saturating_add(60)),
            ..CreateSandboxes::default()
        };
        let own = OwnSnapshot {
            tag: &tag,
            image: &args.image,
        };
        let (children, _) = own
            .start(&client, ui, async || client.spawn(&request).await)
            .await?;
        let id = children
            .first()
            .map(|child| child.id.clone())
            .unwrap_or_default();
        let exec = ExecRequest {
            args: args.command.clone(),
            timeout_secs: args.timeout_secs,
            ..ExecRequest::default()
        };
        let work = async {
            if args.json {
                whole(&client, &id, &exec, ui).await
            } else {
                stream(&client, &id, &exec).await
            }
        };
        let exit = tokio::select! {
            exit = work => exit,
            _ = tokio::signal::ctrl_c() => Ok(Exit::INTERRUPTED),
        };
        // The sandbox goes, whatever became of the command.
        let _ = client.kill(&id).await;
        exit
    })
}
