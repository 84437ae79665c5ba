//! `forkd fork`: starts children, prints timings, and deletes the children on exit.

use std::time::{Duration, Instant};

use forkd_api::{CreateSandboxes, SandboxInfo, SandboxState};
use forkd_rest_client::Client;
use serde_json::json;

use super::children::{end, set_lifetime, start};
use super::door::Door;
use super::spawn::outcome;
use crate::args::ForkArgs;
use crate::daemon::{block_on, connect};
use crate::error::CliResult;
use crate::signals::Stop;
use crate::ui::Ui;

/// Seconds after `--settle-secs` at which the daemon deletes children that this command could not delete.
const SLACK: u64 = 60;
/// Longest lifetime of the children of a killed command. A command that runs longer renews it at half of it.
const LEASE: u64 = 600;

/// Runs `forkd fork`.
pub fn run(args: &ForkArgs, ui: &Ui) -> CliResult {
    let client = connect(&args.daemon)?;
    block_on(async {
        // Installed before the first child starts, so that no signal leaves a child behind.
        let mut stop = Stop::listen()?;
        let mut stopping = false;
        // Before the first child starts: a client may look for its child at once.
        let door = match args.n == 1 && !args.per_child_netns {
            true => Door::open(&client, ui).await?,
            false => None,
        };
        let started = Instant::now();
        let starting = start(&client, args.sandbox.as_deref(), args.freeze, request(args));
        tokio::pin!(starting);
        let children = loop {
            tokio::select! {
                children = &mut starting => match children {
                    Ok(children) => break children,
                    Err(error) => {
                        close(door).await;
                        return Err(error);
                    }
                },
                exit = stop.asked() => {
                    if stopping {
                        close(door).await;
                        ui.talk("interrupted again: the daemon deletes the children when their lifetime is over");
                        return Ok(exit);
                    }
                    stopping = true;
                    ui.talk("interrupted: deleting the children as soon as they have started; interrupt again to leave that to the daemon");
                }
            }
        };
        let wall = started.elapsed();
        let alive = children
            .iter()
            .filter(|child| child.state != SandboxState::Failed)
            .count();
        if let (Some(door), [child]) = (&door, children.as_slice()) {
            door.lead_to(&child.id);
        }
        let reported = report(args, ui, &children, wall, alive);
        if !stopping && reported.is_ok() {
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(args.settle_secs)) => {}
                _ = stop.asked() => {}
                () = renew(&client, &children), if args.settle_secs > LEASE / 2 => {}
            }
        }
        close(door).await;
        end(&client, &children).await;
        reported?;
        Ok(outcome(&children))
    })
}

/// Renews the lifetime of the children without end. A daemon that does not answer is asked again at the next turn.
async fn renew(client: &Client, children: &[SandboxInfo]) {
    let mut due = tokio::time::interval(Duration::from_secs(LEASE / 2));
    due.tick().await;
    loop {
        due.tick().await;
        for child in children {
            // A child that is gone needs no lifetime.
            let _ = set_lifetime(client, &child.id, LEASE).await;
        }
    }
}

/// Closes the door on every way out: it may have added an address to this host.
async fn close(door: Option<Door>) {
    if let Some(door) = door {
        door.close().await;
    }
}

fn request(args: &ForkArgs) -> CreateSandboxes {
    CreateSandboxes {
        snapshot_tag: args.tag.clone().unwrap_or_default(),
        n: args.n,
        per_child_netns: args.per_child_netns,
        limits: args.limits.request(),
        network: args.network.request(),
        timeout_secs: Some(args.settle_secs.saturating_add(SLACK).min(LEASE)),
        volumes: args.volumes.volumes.clone(),
        ..CreateSandboxes::default()
    }
}

fn report(
    args: &ForkArgs,
    ui: &Ui,
    children: &[SandboxInfo],
    wall: Duration,
    alive: usize,
) -> std::io::Result<()> {
    let mut ready: Vec<f64> = children
        .iter()
        .filter_map(|child| child.ready_us)
        .map(|us| us as f64 / 1000.0)
        .collect();
    ready.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let last = ready.len().saturating_sub(1);
        ready
            .get((last as f64 * share).round() as usize)
            .copied()
            .unwrap_or(0.0)
    };
    let wall_ms = wall.as_secs_f64() * 1000.0;
    if args.json {
        return ui.json(&json!({
            "n": children.len(),
            "alive": alive,
            "wall_ms": wall_ms,
            "ready_ms": { "p50": at(0.5), "p99": at(0.99), "max": at(1.0) },
            "ids": children.iter().map(|child| &child.id).collect::<Vec<_>>(),
        }));
    }
    ui.line(format_args!(
        "agent answered: p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms",
        at(0.5),
        at(0.99),
        at(1.0)
    ))?;
    ui.line(format_args!("total wall-clock: {wall_ms:.0} ms"))?;
    ui.line(format_args!("{alive} / {} children alive", children.len()))
}
