//! `forkd snapshot-diff`: runs a command in a child of a snapshot and freezes the result.

use anyhow::{Context, anyhow};
use forkd_api::{BranchMode, BranchRequest, CreateSandboxes, ExecRequest, SnapshotInfo};
use forkd_rest_client::Client;

use crate::args::SnapshotDiffArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::table::facts;
use crate::ui::Ui;

/// Runs `forkd snapshot-diff`.
pub fn run(args: &SnapshotDiffArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    let command = shell_words::split(&args.exec).context("--exec cannot be split into words")?;
    block_on(async {
        let request = CreateSandboxes {
            snapshot_tag: args.from.clone(),
            timeout_secs: Some(args.exec_timeout_secs.saturating_add(600)),
            ..CreateSandboxes::default()
        };
        let children = client.spawn(&request).await.map_err(failed)?;
        let id = children
            .first()
            .map(|child| child.id.clone())
            .unwrap_or_default();
        let made = change(&client, &id, command, args).await;
        // The child is deleted in every case.
        let _ = client.kill(&id).await;
        let made = made?;
        if args.json {
            ui.json(&made)?;
        } else {
            ui.line(facts([
                ("tag", made.tag.clone()),
                ("dir", made.dir.clone()),
                ("parent_tag", made.parent_tag.clone().unwrap_or_default()),
                ("pause_ms", made.pause_ms.unwrap_or_default().to_string()),
                (
                    "diff_physical_bytes",
                    made.diff_physical_bytes.unwrap_or_default().to_string(),
                ),
            ]))?;
        }
        Ok(Exit::OK)
    })
}

async fn change(
    client: &Client,
    id: &str,
    command: Vec<String>,
    args: &SnapshotDiffArgs,
) -> Result<SnapshotInfo, CliError> {
    let exec = ExecRequest {
        args: command,
        timeout_secs: args.exec_timeout_secs,
        ..ExecRequest::default()
    };
    let done = client.exec(id, &exec).await.map_err(failed)?;
    if done.exit_code != 0 {
        return Err(anyhow!(
            "the command failed with exit code {}\n{}{}",
            done.exit_code,
            done.stdout,
            done.stderr
        )
        .into());
    }
    let branch = BranchRequest {
        tag: Some(args.tag.clone()),
        mode: Some(BranchMode::Diff),
        parent_tag: Some(args.from.clone()),
        ..BranchRequest::default()
    };
    client.branch(id, &branch).await.map_err(failed)
}
