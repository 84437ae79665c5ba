//! `rollback`: rolls a running sandbox back to a checkpoint again and again.
//!
//! Every page of the dirty set has changed since the checkpoint, and the checkpoint holds those pages: each
//! round copies all of them.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use forkd_api::{CheckpointRequest, RollbackRequest};
use forkd_types::MiB;
use serde::Serialize;

use crate::daemon::{self, Daemon, MeasureArgs};
use crate::output::Findings;
use crate::report::Host;
use crate::source::Source;
use crate::stats::Spread;

const CLOCK: &str = "through the daemon's REST API, one source of 1 vCPU, every page of the dirty set changed since the \
                     checkpoint, which holds those pages; pause: from the first vCPU stopped to the last one running again; \
                     agent: from the request until the agent had answered; request: from sending the request to its answer; \
                     checkpoint: the same for making one with that much changed since the one before";

#[derive(Debug, clap::Args)]
#[command(mut_arg("rounds", |arg| arg.help("Roll-backs of each kind")))]
pub struct Args {
    /// Memory of the source.
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: MiB,

    /// Memory that changes before a roll-back.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8M,80M",
        value_name = "SIZE,…"
    )]
    dirty: Vec<MiB>,

    #[command(flatten)]
    measure: MeasureArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    rollback: Vec<Rollback>,
    conditions: Conditions,
}

/// Host, repetitions and definitions of a run.
#[derive(Debug, Serialize)]
struct Conditions {
    #[serde(flatten)]
    host: Host,
    memory_mib: u32,
    rounds: u8,
    clock: &'static str,
}

/// Results for one amount of change.
#[derive(Debug, Serialize)]
struct Rollback {
    dirty_mib: u32,
    /// Pages restored in the last round.
    pages: u64,
    pause_ms: Spread,
    agent_ms: Spread,
    request_ms: Spread,
    /// Pause of the checkpoint that all rounds return to.
    checkpoint_pause_ms: f64,
    checkpoint_request_ms: f64,
}

/// Runs the benchmark and prints its results.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let host = Host::here();
    let rollback = daemon::run(&args.measure.daemon, "rollback", async |daemon| {
        let parent = daemon.parent(args.memory).await?;
        let mut results = Vec::new();
        for &dirty in &args.dirty {
            eprintln!("{} roll-backs with {dirty} dirty", args.measure.rounds);
            results.push(measure(daemon, &parent, dirty, args.measure.rounds).await?);
        }
        Ok(results)
    })?;
    let report = Report {
        rollback,
        conditions: Conditions {
            host,
            memory_mib: args.memory.0,
            rounds: args.measure.rounds,
            clock: CLOCK,
        },
    };
    args.measure.output.print(&report)
}

async fn measure(
    daemon: &Daemon,
    parent: &str,
    dirty: MiB,
    rounds: u8,
) -> anyhow::Result<Rollback> {
    let source = Source::start(daemon, parent, dirty).await?;
    // The first checkpoint holds the changes of the preparation. The second one is the target of the
    // roll-backs.
    let client = &daemon.client;
    let anonymous = CheckpointRequest::default();
    client.checkpoint(source.id(), &anonymous).await?;
    source.dirty(dirty).await?;
    let begun = Instant::now();
    let point = client.checkpoint(source.id(), &anonymous).await?;
    let checkpoint = begun.elapsed();
    let back = RollbackRequest {
        to: Some(point.name.clone()),
    };
    let (mut pauses, mut agents, mut requests) = (Vec::new(), Vec::new(), Vec::new());
    let mut pages = 0;
    for _ in 0..rounds {
        source.dirty(dirty).await?;
        let begun = Instant::now();
        let report = client.rollback(source.id(), &back).await?;
        requests.push(begun.elapsed());
        pauses.push(Duration::from_micros(report.pause_us));
        agents.push(Duration::from_micros(report.ready_us));
        pages = report.pages;
    }
    source.end().await;
    Ok(Rollback {
        dirty_mib: dirty.0,
        pages,
        pause_ms: Spread::of(&pauses),
        agent_ms: Spread::of(&agents),
        request_ms: Spread::of(&requests),
        checkpoint_pause_ms: point.pause_us as f64 / 1e3,
        checkpoint_request_ms: crate::stats::millis(checkpoint),
    })
}

impl Findings for Report {
    fn text(&self) -> String {
        let c = &self.conditions;
        let mut text = format!(
            "{}, {} MiB source, {} roll-backs\n\n",
            c.host.line(),
            c.memory_mib,
            c.rounds
        );
        let _ = writeln!(text, "{:<32} {:>9} {:>9} {:>9}", "ms", "p50", "p99", "max");
        for back in &self.rollback {
            let _ = writeln!(
                text,
                "{} MiB dirty, {} pages put back; the checkpoint paused for {:.2} ms, took {:.1} ms",
                back.dirty_mib, back.pages, back.checkpoint_pause_ms, back.checkpoint_request_ms
            );
            for (what, ms) in [
                ("pause", &back.pause_ms),
                ("agent answers", &back.agent_ms),
                ("request", &back.request_ms),
            ] {
                text.push_str(&ms.line(what));
            }
        }
        let _ = writeln!(text, "\nclock: {}", c.clock);
        text
    }
}
