//! `forkd spawn`: starts children that stay.

use std::time::Duration;

use forkd_api::{CreateSandboxes, SandboxInfo, SandboxState};

use super::children::start;
use crate::args::SpawnArgs;
use crate::daemon::{block_on, connect};
use crate::error::{CliResult, Exit, origin};
use crate::ui::Ui;

/// Runs `forkd spawn`.
pub fn run(args: SpawnArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    let request = CreateSandboxes {
        snapshot_tag: args.tag.unwrap_or_default(),
        n: args.n,
        per_child_netns: args.per_child_netns,
        memory_limit_mib: None,
        limits: args.limits.request(),
        network: args.network.request(),
        prewarm: args.prewarm,
        live_fork: args.live_fork,
        hugepages: args.hugepages,
        wait: true,
        timeout_secs: args.timeout.map(|time| whole_seconds(*time)),
        labels: args.labels.into_iter().collect(),
        ports: args.publish.request(),
        volumes: args.volumes.volumes,
        ..CreateSandboxes::default()
    };
    block_on(async {
        let children = start(&client, args.sandbox.as_deref(), args.freeze, request).await?;
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

/// Rounds up to at least one second, because 0 means "never" to the daemon.
fn whole_seconds(time: Duration) -> u64 {
    let more = u64::from(time.subsec_nanos() > 0);
    time.as_secs().saturating_add(more).max(1)
}

/// One line per child. The address is printed only with its network namespace, where it is valid.
fn line(child: &SandboxInfo) -> String {
    let id = &child.id;
    if let Some(body) = &child.error {
        return format!("✗ {id} {} ({})", body.error, origin(body));
    }
    let mut text = format!("✓ {id}");
    if let Some(netns) = &child.netns {
        text.push_str(&format!(" guest={} netns={netns}", child.guest_addr));
    }
    if let Some(us) = child.ready_us {
        text.push_str(&format!(" ready={:.1}ms", us as f64 / 1000.0));
    }
    text
}

/// Failure if a child did not start.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_second_counts_as_one() {
        for (millis, seconds) in [(0, 1), (1, 1), (500, 1), (1000, 1), (1001, 2), (90_000, 90)] {
            assert_eq!(whole_seconds(Duration::from_millis(millis)), seconds);
        }
    }
}
