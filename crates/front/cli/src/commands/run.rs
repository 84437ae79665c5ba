//! `forkd run`: a command in a new sandbox of an image.

use forkd_api::{CreateSandboxes, CreateSnapshot, ErrorCode, ExecRequest};
use forkd_client::Client;

use super::exec::stream;
use crate::args::RunArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult};
use crate::ui::Ui;

/// Runs `forkd run`.
pub fn run(args: &RunArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let tag = format!("run-{}", args.image);
        ensure(&client, &tag, &args.image, ui).await?;
        let request = CreateSandboxes {
            snapshot_tag: tag,
            n: 1,
            wait: true,
            timeout_secs: Some(args.timeout_secs.saturating_add(60)),
            ..CreateSandboxes::default()
        };
        let children = client.spawn(&request).await.map_err(failed)?;
        let id = children
            .first()
            .map(|child| child.id.clone())
            .unwrap_or_default();
        let exec = ExecRequest {
            args: args.command.clone(),
            timeout_secs: args.timeout_secs,
            ..ExecRequest::default()
        };
        let exit = tokio::select! {
            exit = stream(&client, &id, &exec) => exit,
            _ = tokio::signal::ctrl_c() => Ok(crate::error::Exit(130)),
        };
        // The sandbox goes, whatever became of the command.
        let _ = client.kill(&id).await;
        exit
    })
}

/// Makes the snapshot of an image unless it is there; says whether it did.
pub async fn ensure(client: &Client, tag: &str, image: &str, ui: &Ui) -> Result<bool, CliError> {
    match client.snapshot(tag).await {
        Ok(_) => return Ok(false),
        Err(error) if error.code() == Some(ErrorCode::SnapshotNotFound) => {}
        Err(error) => return Err(failed(error)),
    }
    ui.aside(format_args!(
        "first use of {image}: booting a parent, warming it up, freezing it as {tag} …"
    ));
    let request = CreateSnapshot {
        tag: tag.to_owned(),
        image: Some(image.to_owned()),
        boot_wait_secs: 10,
        wait: true,
        ..CreateSnapshot::default()
    };
    match client.create_snapshot(&request).await {
        Ok(_) => Ok(true),
        // Somebody else made it meanwhile.
        Err(error) if error.code() == Some(ErrorCode::AlreadyExists) => Ok(false),
        Err(error) => Err(failed(error)),
    }
}
