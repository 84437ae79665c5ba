//! `fork`: children of a warm Python parent, through the daemon, as a user gets them.

mod memory;
mod report;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use forkd_api::{CreateSandboxes, CreateSnapshot, ExecRequest, SandboxInfo, SandboxState};
use forkd_client::{Client, Target};
use forkd_types::MiB;
use futures::StreamExt;
use futures::future::try_join_all;

use crate::report::Host;
use crate::stats::{Spread, millis};
use memory::Memory;
use report::{Children, Conditions, PerChild, Report};

/// Children that are started one after another for comparison.
const SEQUENTIAL: usize = 10;
/// Requests to end a child that are under way at once.
const ENDINGS: usize = 32;
/// What every child is asked first; the answer proves that it has the parent's interpreter.
const EVAL: &str = "int(np.arange(1000).sum())";
const ANSWER: &str = "499500";

/// Arguments of `fork`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sizes of the bursts.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10, 100], value_name = "N,…")]
    n: Vec<usize>,

    /// The image the parent boots from.
    #[arg(long, default_value = "python-numpy", value_name = "NAME")]
    image: String,

    /// Memory of the parent.
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: MiB,

    /// How long the children idle before their memory is counted again, in seconds.
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    idle: u64,

    /// Address of the daemon.
    #[arg(
        long,
        env = "FORKD_URL",
        default_value = forkd_api::DEFAULT_URL,
        value_name = "URL"
    )]
    daemon_url: String,

    /// Bearer token for it.
    #[arg(
        long,
        env = "FORKD_TOKEN",
        hide_env_values = true,
        value_name = "TOKEN"
    )]
    daemon_token: Option<String>,

    /// Print JSON.
    #[arg(long)]
    json: bool,

    /// Draw the times to this SVG file, too.
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,
}

/// Runs `fork`.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let report = runtime.block_on(measure(args))?;
    if let Some(path) = &args.chart {
        report.chart().write(path)?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.text());
    }
    Ok(())
}

async fn measure(args: &Args) -> anyhow::Result<Report> {
    let target: Target = args.daemon_url.parse()?;
    let client = Client::new(&target, args.daemon_token.clone())?;
    let host = Host::here();
    let tag = format!("bench-fork-{}-{}", args.memory.0, std::process::id());
    eprintln!("warming a parent of {} up", args.memory);
    client
        .create_snapshot(&CreateSnapshot {
            tag: tag.clone(),
            image: Some(args.image.clone()),
            mem_size_mib: Some(args.memory.0),
            rw: true,
            ..CreateSnapshot::default()
        })
        .await
        .context("the daemon made no parent")?;
    let bench = Bench { client, tag };
    let measured = tokio::select! {
        measured = bench.all(args) => measured,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    bench.clean_up().await;
    Ok(Report {
        fork: measured?,
        conditions: Conditions::new(host, args.memory),
    })
}

struct Bench {
    client: Client,
    tag: String,
}

impl Bench {
    async fn all(&self, args: &Args) -> anyhow::Result<Vec<Children>> {
        eprintln!("{SEQUENTIAL} children, one after another");
        let mut alone = Vec::new();
        for _ in 0..SEQUENTIAL {
            let child = self.spawn(1).await?;
            alone.extend(ready(&child));
            self.end(child).await;
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
        let children = self.spawn(n).await?;
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
        self.end(children).await;
        Ok(result)
    }

    async fn spawn(&self, n: usize) -> anyhow::Result<Vec<SandboxInfo>> {
        let request = CreateSandboxes {
            snapshot_tag: self.tag.clone(),
            n: u32::try_from(n)?,
            wait: true,
            ..CreateSandboxes::default()
        };
        let children = self.client.spawn(&request).await?;
        if let Some(failed) = children
            .iter()
            .find(|child| child.state != SandboxState::Running)
        {
            bail!(
                "child {} is {:?}: {:?}",
                failed.id,
                failed.state,
                failed.error
            );
        }
        Ok(children)
    }

    async fn eval(&self, child: &SandboxInfo) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let answer = self.client.eval(&child.id, EVAL).await?;
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
        let answer = self.client.exec(&child.id, &request).await?;
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

    async fn end(&self, children: Vec<SandboxInfo>) {
        futures::stream::iter(children)
            .for_each_concurrent(ENDINGS, |child| async move {
                // One that has failed is gone already.
                let _ = self.client.kill(&child.id).await;
            })
            .await;
    }

    /// Ends what an error or Ctrl-C left, then removes the parent.
    async fn clean_up(&self) {
        let all = self.client.sandboxes().await.unwrap_or_default();
        let left = all
            .into_iter()
            .filter(|child| child.snapshot_tag == self.tag)
            .collect();
        self.end(left).await;
        if let Err(error) = self.client.delete_snapshot(&self.tag, false, false).await {
            eprintln!("the snapshot {} stays: {error}", self.tag);
        }
    }
}

fn ready(children: &[SandboxInfo]) -> Vec<Duration> {
    children
        .iter()
        .filter_map(|child| child.ready_us)
        .map(Duration::from_micros)
        .collect()
}
