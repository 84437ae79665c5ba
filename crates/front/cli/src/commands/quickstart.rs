//! `forkd quickstart`: what forkd does, in one minute.

use std::time::Instant;

use anyhow::anyhow;
use forkd_api::{BranchRequest, CreateSandboxes, SandboxInfo};
use forkd_client::Client;
use futures::StreamExt;

use super::run::ensure;
use crate::args::QuickstartArgs;
use crate::daemon::{block_on, connect, failed};
use crate::error::{CliError, CliResult, Exit};
use crate::ui::Ui;

/// The snapshot it makes.
const TAG: &str = "quickstart";
/// Requests that are under way at once.
const PARALLEL: usize = 16;

/// Runs `forkd quickstart`.
pub fn run(args: &QuickstartArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        let version = client.version().await.map_err(failed)?;
        ui.talk(format_args!(
            "==> daemon {} at {}",
            version.version,
            client.target()
        ));
        ui.talk(format_args!(
            "==> a warm parent of {}, frozen as {TAG}",
            args.image
        ));
        ensure(&client, TAG, &args.image, ui).await?;
        let children = spawn(&client, TAG, args.n, ui).await?;
        let shown = show(&client, &children, ui).await;
        end(&client, &children).await;
        shown?;
        ui.talk("==> done; every sandbox is gone, the snapshot stays");
        ui.line("next:")?;
        for (command, what) in [
            (
                "forkd spawn --tag quickstart -n 3",
                "three sandboxes that stay",
            ),
            ("forkd ls", "see them"),
            ("forkd eval ID -- 'np.arange(5).sum()'", "ask one something"),
            ("forkd shell ID", "look around in one"),
            ("forkd branch ID --tag half-way", "freeze one while it runs"),
            ("forkd kill --all", "end them"),
        ] {
            ui.line(format_args!("  {command:40} {what}"))?;
        }
        Ok(Exit::OK)
    })
}

async fn spawn(client: &Client, tag: &str, n: u32, ui: &Ui) -> Result<Vec<SandboxInfo>, CliError> {
    let started = Instant::now();
    let request = CreateSandboxes {
        snapshot_tag: tag.to_owned(),
        n,
        wait: true,
        timeout_secs: Some(600),
        ..CreateSandboxes::default()
    };
    let children = client.spawn(&request).await.map_err(failed)?;
    let good: Vec<_> = children
        .into_iter()
        .filter(|child| child.error.is_none())
        .collect();
    let wall = started.elapsed();
    ui.talk(format_args!(
        "==> {} children of {tag}: every agent answered, {:.0} ms in all",
        good.len(),
        wall.as_secs_f64() * 1000.0
    ));
    Ok(good)
}

async fn show(client: &Client, children: &[SandboxInfo], ui: &Ui) -> Result<(), CliError> {
    let started = Instant::now();
    let answers: Vec<_> = futures::stream::iter(children.iter().enumerate())
        .map(|(number, child)| async move {
            let code = format!("seen = {number}; seen * seen");
            client.eval(&child.id, &code).await
        })
        .buffered(PARALLEL)
        .collect()
        .await;
    for (number, answer) in answers.into_iter().enumerate() {
        let result = answer.map_err(failed)?.result;
        if result.as_deref() != Some((number * number).to_string().as_str()) {
            return Err(anyhow!("child {number} answered {result:?}").into());
        }
    }
    ui.talk(format_args!(
        "==> each child was asked for another square, all answers right, {:.0} ms in all",
        started.elapsed().as_secs_f64() * 1000.0
    ));
    let Some(first) = children.first() else {
        return Ok(());
    };
    let request = BranchRequest::default();
    client
        .eval(&first.id, "memory = 'of the branch'")
        .await
        .map_err(failed)?;
    let branch = client.branch(&first.id, &request).await.map_err(failed)?;
    let pause = branch.pause_us.unwrap_or_default() as f64 / 1000.0;
    ui.talk(format_args!(
        "==> the first one branched while it ran; it stood still for {pause:.1} ms"
    ));
    let grand = spawn(client, &branch.tag, 2, ui).await;
    let remembered = match &grand {
        Ok(children) => check_memory(client, children).await,
        Err(_) => Ok(()),
    };
    if let Ok(children) = &grand {
        end(client, children).await;
    }
    client
        .delete_snapshot(&branch.tag, false, true)
        .await
        .map_err(failed)?;
    grand?;
    remembered?;
    ui.talk("==> and its children remember what it knew");
    Ok(())
}

async fn check_memory(client: &Client, children: &[SandboxInfo]) -> Result<(), CliError> {
    for child in children {
        let answer = client.eval(&child.id, "memory").await.map_err(failed)?;
        if answer.result.as_deref() != Some("'of the branch'") {
            return Err(anyhow!("a child of the branch answered {:?}", answer.result).into());
        }
    }
    Ok(())
}

async fn end(client: &Client, children: &[SandboxInfo]) {
    futures::stream::iter(children)
        .for_each_concurrent(PARALLEL, |child| async move {
            // The daemon deletes it in the end.
            let _ = client.kill(&child.id).await;
        })
        .await;
}
