//! `fork`: children of a warm Python parent, through the daemon, as a user gets them.
//!
//! Measures bursts of several sizes: time until ready, first `eval`, first `exec`, and memory. Children that
//! start one after another are the comparison.

mod memory;
mod report;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::bail;
use forkd_api::{ExecRequest, SandboxInfo};
use forkd_types::MiB;
use futures::future::try_join_all;

use crate::daemon::{self, Daemon, DaemonArgs, ready};
use crate::output::OutputArgs;
use crate::report::Host;
use crate::stats::{Spread, millis};
use memory::Memory;
use report::{Children, Conditions, PerChild, Report};

/// Number of children that are started one after another.
const SEQUENTIAL: usize = 10;
/// The first request to every child. Its result proves that the child has the parent's interpreter.
const EVAL: &str = "int(np.arange(1000).sum())";
const ANSWER: &str = "499500";

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sizes of the bursts.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10, 100], value_name = "N,…")]
    n: Vec<usize>,

    /// Memory of the parent.
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: MiB,

    /// Seconds until the memory of the idle children is counted again.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    idle: u64,

    #[command(flatten)]
    daemon: DaemonArgs,

    #[command(flatten)]
    output: OutputArgs,

    /// Also draw the times to this SVG file.
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,
}

/// Runs the benchmark and prints its results.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let host = Host::here();
    let fork = daemon::run(&args.daemon, "fork", async |daemon| {
        let tag = daemon.parent(args.memory).await?;
        Bench { daemon, tag }.all(args).await
    })?;
    let report = Report {
        fork,
        conditions: Conditions::new(host, args.memory),
    };
    if let Some(path) = &args.chart {
        report.chart().write(path)?;
    }
    args.output.print(&report)
}

struct Bench<'a> {
    daemon: &'a Daemon,
    tag: String,
}

impl Bench<'_> {
    async fn all(&self, args: &Args) -> anyhow::Result<Vec<Children>> {
        eprintln!("{SEQUENTIAL} children, one after another");
        let mut alone = Vec::new();
        for _ in 0..SEQUENTIAL {
            let child = self.daemon.spawn(&self.tag, 1).await?;
            alone.extend(ready(&child));
            self.daemon.end(child).await;
        }
        let alone = Spread::of(&alone);
        let mut results = Vec::new();
        for &n in &args.n {
            results.push(self.burst(n, alone, args.idle).await?);
        }
        Ok(results)
    }

    async fn burst(&self, n: usize, alone: Spread, idle: u64) -> anyhow::Result<Children> {
        eprintln!("{n} children at once");
        let available = memory::available_kib()?;
        let begin = Instant::now();
        let children = self.daemon.spawn(&self.tag, n).await?;
        let wall = begin.elapsed();
        let eval = try_join_all(children.iter().map(|child| self.eval(child))).await?;
        let exec = try_join_all(children.iter().map(|child| self.exec(child))).await?;
        let count = || Memory::of(&children, available).map(|memory| memory.per_child(n));
        let at_once = count();
        if idle > 0 {
            eprintln!("waiting {idle} s: what an idle child takes");
            tokio::time::sleep(Duration::from_secs(idle)).await;
        }
        let memory = at_once.zip(count()).map(|(at_once, idle_60s)| PerChild {
            counted: at_once,
            idle_60s,
        });
        let result = Children {
            n,
            wall_ms: millis(wall),
            ready_ms: Spread::of(&ready(&children)),
            eval_ms: Spread::of(&eval),
            exec_ms: Spread::of(&exec),
            sequential_ready_ms: alone,
            memory,
        };
        self.daemon.end(children).await;
        Ok(result)
    }

    async fn eval(&self, child: &SandboxInfo) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let answer = self.daemon.client.eval(&child.id, EVAL).await?;
        let took = begin.elapsed();
        if answer.result.as_deref() != Some(ANSWER) {
            bail!("child {} answers {answer:?}", child.id);
        }
        Ok(took)
    }

    async fn exec(&self, child: &SandboxInfo) -> anyhow::Result<Duration> {
        let request = ExecRequest {
            args: vec!["true".to_owned()],
            ..ExecRequest::default()
        };
        let begin = Instant::now();
        let answer = self.daemon.client.exec(&child.id, &request).await?;
        let took = begin.elapsed();
        if answer.exit_code != 0 {
            bail!(
                "`true` in child {} ended with {}",
                child.id,
                answer.exit_code
            );
        }
        Ok(took)
    }
}
