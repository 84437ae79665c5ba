//! `forkd spawn`: children that stay.

use forkd_api::{CreateSandboxes, SandboxInfo, SandboxState};

use crate::args::SpawnArgs;
use crate::daemon::{block_on, connect, failed, pairs};
use crate::error::{CliResult, Exit};
use crate::ui::Ui;

/// Runs `forkd spawn`.
pub fn run(args: SpawnArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    let request = CreateSandboxes {
        snapshot_tag: args.tag,
        n: args.n,
        per_child_netns: args.per_child_netns,
        memory_limit_mib: args.memory_limit_mib,
        prewarm: args.prewarm,
        live_fork: args.live_fork,
        hugepages: args.hugepages,
        wait: true,
        timeout_secs: args.timeout.map(|time| time.as_secs()),
        labels: pairs(&args.labels)?,
    };
    block_on(async {
        let children = client.spawn(&request).await.map_err(failed)?;
        if args.json {
            ui.json(&children)?;
        } else {
            for child in &children {
                ui.line(line(child))?;
            }
        }
        Ok(outcome(&children))
    })
}

/// One child as a line.
pub fn line(child: &SandboxInfo) -> String {
    match &child.error {
        Some(error) => format!("✗ {} {}", child.id, error.error),
        None => {
            let netns = child.netns.as_deref().unwrap_or("-");
            let ready = child
                .ready_us
                .map(|us| format!(" ready={:.1}ms", us as f64 / 1000.0));
            format!(
                "✓ {} guest={} netns={netns}{}",
                child.id,
                child.guest_addr,
                ready.unwrap_or_default()
            )
        }
    }
}

/// Success if every child runs.
pub fn outcome(children: &[SandboxInfo]) -> Exit {
    if children
        .iter()
        .any(|child| child.state == SandboxState::Failed)
    {
        Exit::FAILURE
    } else {
        Exit::OK
    }
}
