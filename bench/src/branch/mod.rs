//! `branch`: branches a running sandbox again and again, and forks it in one step.
//!
//! Measures the guest's own view of the pause, the host's view, and the time until source, snapshot and child
//! are usable. [`report`] has the definitions.

mod report;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use forkd_api::{BranchRequest, EventInfo, EventKind, ForkRequest};
use forkd_rest_client::Frames;
use forkd_types::MiB;

use crate::daemon::{self, Daemon, MeasureArgs};
use crate::report::Host;
use crate::source::Source;
use report::{Branch, Conditions, Report};

/// How long the guest reads its clock. The source has to run again within that time. The benchmark sends no
/// request to the guest meanwhile, because the request would show up as a gap.
const WATCH: Duration = Duration::from_secs(2);

#[derive(Debug, clap::Args)]
#[command(mut_arg("rounds", |arg| arg.help("Branches in a row").value_parser(clap::value_parser!(u8).range(1..=20))))]
pub struct Args {
    /// Memory of the sources.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "512M,1536M",
        value_name = "SIZE,…"
    )]
    memory: Vec<MiB>,

    /// Memory that changes between branches.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8M,30M,300M",
        value_name = "SIZE,…"
    )]
    dirty: Vec<MiB>,

    /// Freeze the processes in the source for each cut.
    #[arg(long)]
    freeze: bool,

    #[command(flatten)]
    measure: MeasureArgs,
}

/// Runs the benchmark and prints its results.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let host = Host::here();
    let branch = daemon::run(&args.measure.daemon, "branch", async |daemon| {
        let mut results = Vec::new();
        for &memory in &args.memory {
            let parent = daemon.parent(memory).await?;
            for &dirty in &args.dirty {
                eprintln!(
                    "{} branches of {memory} with {dirty} dirty",
                    args.measure.rounds
                );
                let measured = measure(daemon, &parent, memory, dirty, args).await?;
                results.push(measured);
            }
        }
        Ok(results)
    })?;
    let report = Report {
        branch,
        conditions: Conditions::new(host, args.measure.rounds.into(), args.freeze),
    };
    args.measure.output.print(&report)
}

/// Durations of one branch.
#[derive(Debug, Default)]
pub struct Times {
    /// The longest gap of the guest's clock in the period that begins with the request.
    pub guest_gap: Duration,
    /// The longest gap in a period of the same length without a branch.
    pub quiet_gap: Duration,
    /// The pause as the VMM reports it.
    pub host_pause: Duration,
    /// From the request until the source ran again.
    pub source_runs: Duration,
    /// From the request until the snapshot was durable.
    pub durable: Duration,
    /// From the request until a child of it had answered.
    pub child_answers: Duration,
    /// From the request for a live fork, with the same amount changed, until the child had answered.
    pub fork_answers: Duration,
    /// Bytes of memory written.
    pub written: u64,
}

async fn measure(
    daemon: &Daemon,
    parent: &str,
    memory: MiB,
    dirty: MiB,
    args: &Args,
) -> anyhow::Result<Branch> {
    let source = Source::start(daemon, parent, dirty).await?;
    let mut events = daemon.client.events().await?;
    let mut all = Vec::new();
    // The first branch holds everything that the preparation changed. It is not counted.
    for round in 0..=args.measure.rounds {
        source.dirty(dirty).await?;
        let tag = daemon.tag(&format!("{}-{}-{round}", memory.0, dirty.0));
        let times = once(daemon, &source, dirty, (&tag, args.freeze), &mut events).await?;
        if round > 0 {
            all.push(times);
        }
    }
    source.end().await;
    Ok(Branch::of(memory, dirty, &all))
}

async fn once(
    daemon: &Daemon,
    source: &Source<'_>,
    dirty: MiB,
    (tag, freeze): (&str, bool),
    events: &mut Frames<EventInfo>,
) -> anyhow::Result<Times> {
    source.watch(WATCH).await?;
    let request = BranchRequest {
        tag: Some(tag.to_owned()),
        wait: false,
        freeze,
        ..BranchRequest::default()
    };
    let begun = Instant::now();
    let branched = async {
        let info = daemon.client.branch(source.id(), &request).await?;
        anyhow::Ok((info, begun.elapsed()))
    };
    let durable = async {
        until_durable(events, tag).await?;
        anyhow::Ok(begun.elapsed())
    };
    let ((info, source_runs), durable) = tokio::try_join!(branched, durable)?;
    let asked = Instant::now();
    let child = daemon.start(tag).await?;
    let child_answers = durable + asked.elapsed();
    daemon.end(vec![child]).await;
    let guest_gap = source.longest_gap().await?;
    source.watch(WATCH).await?;
    tokio::time::sleep(WATCH).await;
    let quiet_gap = source.longest_gap().await?;
    let detail = daemon.client.snapshot(tag).await?;
    source.dirty(dirty).await?;
    let fork_answers = fork(daemon, source, freeze).await?;
    Ok(Times {
        guest_gap,
        quiet_gap,
        host_pause: Duration::from_micros(info.pause_us.context("no pause is known")?),
        source_runs,
        durable,
        child_answers,
        fork_answers,
        written: detail.memory_physical_bytes,
    })
}

/// Forks the source in one step.
async fn fork(daemon: &Daemon, source: &Source<'_>, freeze: bool) -> anyhow::Result<Duration> {
    let request = ForkRequest {
        n: 1,
        timeout_secs: None,
        labels: BTreeMap::new(),
        freeze,
        network: None,
    };
    let begun = Instant::now();
    let children = daemon.client.fork(source.id(), &request).await?;
    let answered = begun.elapsed();
    daemon.end(children).await;
    Ok(answered)
}

async fn until_durable(events: &mut Frames<EventInfo>, tag: &str) -> anyhow::Result<()> {
    while let Some(event) = events.next().await? {
        match event.kind {
            EventKind::SnapshotReady if event.object == tag => return Ok(()),
            EventKind::SnapshotFailed if event.object == tag => {
                bail!("the branch {tag} failed: {:?}", event.detail)
            }
            _ => {}
        }
    }
    bail!("the daemon tells no more events")
}
