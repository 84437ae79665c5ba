//! `operations`: how long each main operation takes, from the request to its answer.
//!
//! Made for a machine with the instruction clock, where the same operation takes the same time whatever the
//! load of the host. Such a machine hangs a guest now and then (see `docs/guides/machine.md`). Every
//! measurement has a deadline; one that misses it is taken again from the start, with new sandboxes, and the
//! report counts those.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::bail;
use forkd_api::{
    BranchRequest, CheckpointRequest, ExecRequest, ForkRequest, RollbackRequest, SandboxInfo,
};
use forkd_types::MiB;
use serde::Serialize;

use crate::daemon::{self, Daemon, MeasureArgs, ready};
use crate::deadline::Deadline;
use crate::expected::Expected;
use crate::output::Findings;
use crate::report::Host;
use crate::source::Source;
use crate::stats::{Spread, millis};

/// How often a measurement that misses its deadline is taken again.
const RETRIES: u32 = 5;
/// A parent boots and imports NumPy within this many deadlines.
const PARENT_DEADLINES: u32 = 2;

const CLOCK: &str = "through the daemon's REST API on an open connection, from sending the request to its answer; \
                     spawn ready, burst ready: from the request until the child's agent had answered; exec: `true`; \
                     eval: `1`; first: the first request of its kind to a new child; branch: until the snapshot is \
                     durable; fork, branch, checkpoint, rollback: of a source that changed the dirty memory since \
                     its last cut";

/// An operation to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Operation {
    /// One child of a warm parent.
    Spawn,
    /// Several children at once.
    Burst,
    /// A command in a child.
    Exec,
    /// Python in the warm interpreter of a child.
    Eval,
    /// A live fork of a running sandbox.
    Fork,
    /// A branch of a running sandbox.
    Branch,
    /// A checkpoint of a running sandbox.
    Checkpoint,
    /// A roll-back to a checkpoint.
    Rollback,
}

const ALL: [Operation; 8] = [
    Operation::Spawn,
    Operation::Burst,
    Operation::Exec,
    Operation::Eval,
    Operation::Fork,
    Operation::Branch,
    Operation::Checkpoint,
    Operation::Rollback,
];

#[derive(Debug, clap::Args)]
#[command(mut_arg("rounds", |arg| arg.default_value("5")))]
pub struct Args {
    /// Operations to measure [default: all]
    #[arg(value_enum, value_name = "OPERATION")]
    operations: Vec<Operation>,

    /// Children of a burst
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    n: u16,

    /// Memory of the parent
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: MiB,

    /// Memory that the source changes before it is forked, branched or rolled back
    #[arg(long, default_value = "8M", value_name = "SIZE")]
    dirty: MiB,

    /// Multiply every deadline, for a busy host
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100), value_name = "N")]
    patience: u32,

    /// Fail if an operation does not keep to the times in this file; needs the instruction clock
    #[arg(long, value_name = "FILE")]
    expect: Option<PathBuf>,

    #[command(flatten)]
    measure: MeasureArgs,
}

/// Runs the benchmark and prints its results.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let host = Host::here();
    let deadline = Deadline::of(&host).times(args.patience);
    let expected = match &args.expect {
        Some(_) if !host.counts_instructions() => bail!(
            "--expect compares times of the instruction clock; start the machine with --clock instructions"
        ),
        Some(path) => Some(Expected::read(path)?),
        None => None,
    };
    let wanted = match args.operations.as_slice() {
        [] => &ALL[..],
        some => some,
    };
    let (operations, repeated) = daemon::run(&args.measure.daemon, "operations", async |daemon| {
        let mut bench = Bench {
            daemon,
            args,
            deadline,
            expected: expected.as_ref(),
            repeated: 0,
            tag: String::new(),
        };
        bench.warm_parent().await?;
        let mut rows = Vec::new();
        for &operation in wanted {
            eprintln!("{operation:?}, {} rounds", args.measure.rounds);
            rows.extend(bench.measure(operation).await?);
        }
        Ok((rows, bench.repeated))
    })?;
    let complaints = expected.map_or_else(Vec::new, |expected| {
        expected.complaints(operations.iter().map(|row| (row.name, row.min_ms)))
    });
    args.measure.output.print(&Report {
        operations,
        conditions: Conditions {
            host,
            memory_mib: args.memory.0,
            dirty_mib: args.dirty.0,
            rounds: args.measure.rounds,
            repeated,
            clock: CLOCK,
        },
    })?;
    match complaints.as_slice() {
        [] => Ok(()),
        all => bail!("{}", all.join("\n")),
    }
}

/// The measured times of one row of the report.
type Times = (&'static str, Vec<Duration>);

struct Bench<'a> {
    daemon: &'a Daemon,
    args: &'a Args,
    deadline: Deadline,
    expected: Option<&'a Expected>,
    /// Measurements that missed their deadline or failed, and were taken again.
    repeated: u32,
    /// The warm parent.
    tag: String,
}

impl Bench<'_> {
    async fn warm_parent(&mut self) -> anyhow::Result<()> {
        let limit = self.deadline.times(PARENT_DEADLINES);
        for attempt in 0..=RETRIES {
            let name = format!("parent{attempt}");
            let made = self.daemon.parent_named(&name, self.args.memory);
            match limit.within(made).await {
                Ok(tag) => {
                    self.tag = tag;
                    return self.first_child().await;
                }
                Err(error) => {
                    self.again("the parent", &error).await;
                    // Ends the build in the daemon, which may go on.
                    self.daemon.remove(&name).await;
                }
            }
        }
        bail!("no parent after {RETRIES} retries")
    }

    /// The daemon records the working set of a tag with its first child, which therefore takes longer.
    async fn first_child(&mut self) -> anyhow::Result<()> {
        for _ in 0..=RETRIES {
            let child = self.deadline.within(self.daemon.spawn(&self.tag, 1)).await;
            match child {
                Ok(child) => {
                    self.daemon.end(child).await;
                    return Ok(());
                }
                Err(error) => self.again("the first child", &error).await,
            }
        }
        bail!("no child after {RETRIES} retries")
    }

    async fn measure(&mut self, operation: Operation) -> anyhow::Result<Vec<Row>> {
        for attempt in 0..=RETRIES {
            let rounds = u32::from(self.args.measure.rounds);
            match self
                .deadline
                .times(rounds + 1)
                .within(self.once(operation))
                .await
            {
                Ok(times) => {
                    let rows: Vec<_> = times.iter().map(Row::of).collect();
                    // Work that another operation left behind can make one measurement slow, but not two.
                    if attempt == 0 && self.is_slow(&rows) {
                        self.repeated += 1;
                        continue;
                    }
                    return Ok(rows);
                }
                Err(error) => self.again(&format!("{operation:?}"), &error).await,
            }
        }
        bail!("{operation:?} failed {RETRIES} times in a row")
    }

    fn is_slow(&self, rows: &[Row]) -> bool {
        self.expected.is_some_and(|expected| {
            rows.iter()
                .any(|row| expected.is_slow(row.name, row.min_ms))
        })
    }

    /// Notes a failed measurement and removes its sandboxes.
    async fn again(&mut self, what: &str, error: &anyhow::Error) {
        eprintln!("{what} is measured again: {error:#}");
        self.repeated += 1;
        self.daemon.end_all().await;
    }

    async fn once(&self, operation: Operation) -> anyhow::Result<Vec<Times>> {
        match operation {
            Operation::Spawn => self.spawn(1, ["spawn request", "spawn ready"]).await,
            Operation::Burst => {
                let n = usize::from(self.args.n);
                self.spawn(n, ["burst request", "burst ready"]).await
            }
            Operation::Exec => self.twice(["exec first", "exec"], Self::exec).await,
            Operation::Eval => self.twice(["eval first", "eval"], Self::eval).await,
            Operation::Fork => self.with_source("fork", Self::fork).await,
            Operation::Branch => self.with_source("branch", Self::branch).await,
            Operation::Checkpoint => self.with_source("checkpoint", Self::checkpoint).await,
            Operation::Rollback => self.rollback().await,
        }
    }

    async fn spawn(
        &self,
        n: usize,
        [request, ready_name]: [&'static str; 2],
    ) -> anyhow::Result<Vec<Times>> {
        let (mut requests, mut agents) = (Vec::new(), Vec::new());
        for _ in 0..self.args.measure.rounds {
            let begun = Instant::now();
            let children = self
                .deadline
                .within(self.daemon.spawn(&self.tag, n))
                .await?;
            requests.push(begun.elapsed());
            agents.extend(ready(&children));
            self.daemon.end(children).await;
            self.settle().await;
        }
        Ok(vec![(request, requests), (ready_name, agents)])
    }

    /// Measures the first request to a new child and the second one.
    async fn twice<F>(&self, names: [&'static str; 2], ask: F) -> anyhow::Result<Vec<Times>>
    where
        F: AsyncFn(&Self, &SandboxInfo) -> anyhow::Result<()>,
    {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..self.args.measure.rounds {
            let child = self.deadline.within(self.daemon.start(&self.tag)).await?;
            for times in &mut times {
                self.settle().await;
                let begun = Instant::now();
                self.deadline.within(ask(self, &child)).await?;
                times.push(begun.elapsed());
            }
            self.daemon.end(vec![child]).await;
        }
        let [first, later] = times;
        Ok(vec![(names[0], first), (names[1], later)])
    }

    async fn exec(&self, child: &SandboxInfo) -> anyhow::Result<()> {
        let request = ExecRequest {
            args: vec!["true".to_owned()],
            ..ExecRequest::default()
        };
        let answer = self.daemon.client.exec(&child.id, &request).await?;
        if answer.exit_code != 0 {
            bail!("`true` ended with {}", answer.exit_code);
        }
        Ok(())
    }

    async fn eval(&self, child: &SandboxInfo) -> anyhow::Result<()> {
        match self.daemon.eval(&child.id, "1").await?.as_str() {
            "1" => Ok(()),
            other => bail!("`1` is answered with {other:?}"),
        }
    }

    /// Measures an operation on a source that changes its memory before each round.
    async fn with_source<F>(&self, name: &'static str, act: F) -> anyhow::Result<Vec<Times>>
    where
        F: AsyncFn(&Self, &Source<'_>, u32) -> anyhow::Result<Vec<SandboxInfo>>,
    {
        let source = self.deadline.within(self.source()).await?;
        let mut times = Vec::new();
        // The first cut holds everything that the preparation changed. It is not counted.
        for round in 0..=u32::from(self.args.measure.rounds) {
            self.deadline.within(source.dirty(self.args.dirty)).await?;
            self.settle().await;
            let begun = Instant::now();
            let children = self.deadline.within(act(self, &source, round)).await?;
            if round > 0 {
                times.push(begun.elapsed());
            }
            self.daemon.end(children).await;
        }
        source.end().await;
        Ok(vec![(name, times)])
    }

    async fn source(&self) -> anyhow::Result<Source<'_>> {
        Source::start(self.daemon, &self.tag, self.args.dirty).await
    }

    async fn fork(&self, source: &Source<'_>, _: u32) -> anyhow::Result<Vec<SandboxInfo>> {
        let request = ForkRequest {
            n: 1,
            timeout_secs: None,
            labels: BTreeMap::new(),
            freeze: false,
            network: None,
        };
        Ok(self.daemon.client.fork(source.id(), &request).await?)
    }

    async fn branch(&self, source: &Source<'_>, round: u32) -> anyhow::Result<Vec<SandboxInfo>> {
        let request = BranchRequest {
            tag: Some(self.daemon.tag(&format!("{}-{round}", source.id()))),
            wait: true,
            ..BranchRequest::default()
        };
        self.daemon.client.branch(source.id(), &request).await?;
        Ok(Vec::new())
    }

    async fn checkpoint(&self, source: &Source<'_>, _: u32) -> anyhow::Result<Vec<SandboxInfo>> {
        let request = CheckpointRequest::default();
        self.daemon.client.checkpoint(source.id(), &request).await?;
        Ok(Vec::new())
    }

    async fn rollback(&self) -> anyhow::Result<Vec<Times>> {
        let client = &self.daemon.client;
        let source = self.deadline.within(self.source()).await?;
        let point = client
            .checkpoint(source.id(), &CheckpointRequest::default())
            .await?;
        let back = RollbackRequest {
            to: Some(point.name),
        };
        let (mut requests, mut pauses) = (Vec::new(), Vec::new());
        for _ in 0..self.args.measure.rounds {
            self.deadline.within(source.dirty(self.args.dirty)).await?;
            self.settle().await;
            let begun = Instant::now();
            let report = self
                .deadline
                .within(async { Ok(client.rollback(source.id(), &back).await?) })
                .await?;
            requests.push(begun.elapsed());
            pauses.push(Duration::from_micros(report.pause_us));
        }
        source.end().await;
        Ok(vec![("rollback", requests), ("rollback pause", pauses)])
    }

    /// Lets work that the previous operation left behind finish: the pool refills, processes end.
    async fn settle(&self) {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[derive(Debug, Serialize)]
struct Report {
    operations: Vec<Row>,
    conditions: Conditions,
}

/// Host, repetitions and definitions of a run.
#[derive(Debug, Serialize)]
struct Conditions {
    #[serde(flatten)]
    host: Host,
    memory_mib: u32,
    dirty_mib: u32,
    rounds: u8,
    /// Measurements that missed their deadline or failed, and were taken again.
    repeated: u32,
    clock: &'static str,
}

/// One line of the report.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    min_ms: f64,
    ms: Spread,
}

impl Row {
    fn of((name, times): &Times) -> Self {
        Self {
            name,
            min_ms: times.iter().min().copied().map_or(0.0, millis),
            ms: Spread::of(times),
        }
    }
}

impl Findings for Report {
    fn text(&self) -> String {
        let c = &self.conditions;
        let mut text = format!(
            "{}, {} MiB parent, {} MiB dirty, {} rounds, {} taken again\n\n",
            c.host.line(),
            c.memory_mib,
            c.dirty_mib,
            c.rounds,
            c.repeated
        );
        let _ = writeln!(
            text,
            "{:<20} {:>10} {:>10} {:>10}",
            "ms", "min", "p50", "max"
        );
        for row in &self.operations {
            let _ = writeln!(
                text,
                "{:<20} {:>10.2} {:>10.2} {:>10.2}",
                row.name, row.min_ms, row.ms.p50, row.ms.max
            );
        }
        let _ = writeln!(text, "\nclock: {}", c.clock);
        text
    }
}
