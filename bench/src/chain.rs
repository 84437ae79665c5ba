//! `chain`: the cost of a deep chain of snapshots, at spawn and on disk.
//!
//! Builds a chain in which each link is a branch of a child of the link before. Then starts children at
//! several depths in turn.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, ensure};
use forkd_api::BranchRequest;
use forkd_types::MiB;
use serde::Serialize;

use crate::daemon::{self, Daemon, MeasureArgs, ready};
use crate::output::Findings;
use crate::report::Host;
use crate::source::Source;
use crate::stats::Spread;

/// Size of the file that each link writes, beside memory.
const FILE_KIB: u32 = 256;

const CLOCK: &str = "through the daemon's REST API; ready: from the request for one child until its agent has answered \
                     and has made it a machine of its own, the depths in turn; bytes: what the store takes on disk more than \
                     before, everything of it counted, so nothing else may use the daemon meanwhile; changes: pages of \
                     memory that were written, and the files";

#[derive(Debug, clap::Args)]
#[command(mut_arg("rounds", |arg| arg.help("Children at each depth").default_value("20").value_parser(clap::value_parser!(u8).range(1..=200))))]
pub struct Args {
    /// Memory of the base.
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: MiB,

    /// Depths at which children are started; the largest is the length of the chain.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1, 3, 10], value_name = "N,…")]
    depth: Vec<usize>,

    /// Memory that each link changes.
    #[arg(long, default_value = "1M", value_name = "SIZE")]
    dirty: MiB,

    #[command(flatten)]
    measure: MeasureArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    chain: Vec<Depth>,
    disk: Disk,
    conditions: Conditions,
}

/// Children at one depth.
#[derive(Debug, Serialize)]
struct Depth {
    depth: usize,
    ready_ms: Spread,
    /// Median, divided by the median of the smallest depth.
    ratio: f64,
}

/// Disk usage of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Disk {
    links: usize,
    /// The base without its image.
    base_bytes: u64,
    /// Changes of all links together.
    changed_bytes: u64,
    /// Disk usage of the links.
    chain_bytes: u64,
    /// Base and chain, divided by base and changes.
    ratio: f64,
}

impl Disk {
    fn new(links: usize, base_bytes: u64, changed_bytes: u64, chain_bytes: u64) -> Self {
        let needed = (base_bytes + changed_bytes).max(1);
        Self {
            links,
            base_bytes,
            changed_bytes,
            chain_bytes,
            ratio: (base_bytes + chain_bytes) as f64 / needed as f64,
        }
    }
}

/// Host, repetitions and definitions of a run.
#[derive(Debug, Serialize)]
struct Conditions {
    #[serde(flatten)]
    host: Host,
    memory_mib: u32,
    dirty_mib: u32,
    rounds: u8,
    clock: &'static str,
}

/// Runs the benchmark and prints its results.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let host = Host::here();
    let (chain, disk) = daemon::run(&args.measure.daemon, "chain", async |daemon| {
        let (tags, disk) = build(daemon, args).await?;
        Ok((spawn(daemon, args, &tags).await?, disk))
    })?;
    let report = Report {
        chain,
        disk,
        conditions: Conditions {
            host,
            memory_mib: args.memory.0,
            dirty_mib: args.dirty.0,
            rounds: args.measure.rounds,
            clock: CLOCK,
        },
    };
    args.measure.output.print(&report)
}

/// Builds the chain: each link is branched from a child of the one before.
async fn build(daemon: &Daemon, args: &Args) -> anyhow::Result<(Vec<String>, Disk)> {
    let empty = daemon.client.store().await?.physical_bytes;
    let parent = daemon.parent(args.memory).await?;
    let source = Source::start(daemon, &parent, args.dirty).await?;
    let base = daemon.tag("0");
    branch(daemon, &source, &base).await?;
    source.end().await;
    let before = daemon.client.store().await?.physical_bytes;
    let links = args.depth.iter().copied().max().unwrap_or(0);
    let mut tags = vec![base.clone()];
    let mut changed = 0;
    for number in 1..=links {
        eprintln!("link {number} of {links}");
        let below = tags.last().context("a chain without a base")?;
        let source = Source::from(daemon, daemon.start(below).await?);
        source.dirty(args.dirty).await?;
        source.file(number, FILE_KIB).await?;
        let tag = daemon.tag(&number.to_string());
        changed += branch(daemon, &source, &tag).await? + u64::from(FILE_KIB) * 1024;
        source.end().await;
        tags.push(tag);
    }
    let after = daemon.client.store().await?.physical_bytes;
    let disk = Disk::new(
        links,
        before.saturating_sub(empty),
        changed,
        after.saturating_sub(before),
    );
    Ok((tags, disk))
}

/// Branches the changes. Returns the bytes of memory written.
async fn branch(daemon: &Daemon, source: &Source<'_>, tag: &str) -> anyhow::Result<u64> {
    let request = BranchRequest {
        tag: Some(tag.to_owned()),
        ..BranchRequest::default()
    };
    let info = daemon.client.branch(source.id(), &request).await?;
    info.diff_physical_bytes
        .context("the daemon does not say what the branch wrote")
}

async fn spawn(daemon: &Daemon, args: &Args, tags: &[String]) -> anyhow::Result<Vec<Depth>> {
    let mut depths = args.depth.clone();
    depths.sort_unstable();
    let offset = daemon.client.snapshot(&tags[0]).await?.chain_depth;
    for &depth in &depths {
        let found = daemon.client.snapshot(&tags[depth]).await?.chain_depth - offset;
        ensure!(
            usize::try_from(found)? == depth,
            "{} is {found} deep, not {depth}",
            tags[depth]
        );
    }
    let mut times = vec![Vec::new(); depths.len()];
    for round in 1..=args.measure.rounds {
        eprintln!("children, round {round} of {}", args.measure.rounds);
        for (depth, times) in depths.iter().zip(&mut times) {
            let child = daemon.spawn(&tags[*depth], 1).await?;
            times.extend(ready(&child));
            daemon.end(child).await;
        }
    }
    Ok(compared(&depths, &times))
}

fn compared(depths: &[usize], times: &[Vec<Duration>]) -> Vec<Depth> {
    let spreads: Vec<Spread> = times.iter().map(|times| Spread::of(times)).collect();
    let first = spreads.first().map_or(0.0, |spread| spread.p50);
    depths
        .iter()
        .zip(spreads)
        .map(|(&depth, ready_ms)| Depth {
            depth,
            ready_ms,
            ratio: ready_ms.p50 / first,
        })
        .collect()
}

impl Findings for Report {
    fn text(&self) -> String {
        let c = &self.conditions;
        let mut text = format!(
            "{}, {} MiB base, {} MiB changed a link, {} children at each depth\n\n",
            c.host.line(),
            c.memory_mib,
            c.dirty_mib,
            c.rounds
        );
        let _ = writeln!(
            text,
            "{:<32} {:>9} {:>9} {:>9} {:>9}",
            "ready in ms", "p50", "p99", "max", "ratio"
        );
        for depth in &self.chain {
            let line = depth.ready_ms.line(&format!("depth {}", depth.depth));
            let _ = writeln!(text, "{} {:>9.3}", line.trim_end(), depth.ratio);
        }
        let d = &self.disk;
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let _ = writeln!(
            text,
            "\ndisk: base {:.1} MiB, {} links {:.1} MiB, of that changes {:.1} MiB; {:.3} times base and changes",
            mib(d.base_bytes),
            d.links,
            mib(d.chain_bytes),
            mib(d.changed_bytes),
            d.ratio
        );
        let _ = writeln!(text, "\nclock: {}", c.clock);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_are_compared_with_the_first() {
        let ms = |n| vec![Duration::from_millis(n); 3];
        let compared = compared(&[0, 10], &[ms(100), ms(105)]);
        assert_eq!(compared[0].ratio, 1.0);
        assert_eq!((compared[1].depth, compared[1].ratio), (10, 1.05));
    }

    #[test]
    fn a_chain_that_takes_what_changed_has_ratio_one() {
        assert_eq!(Disk::new(10, 900, 100, 100).ratio, 1.0);
        assert_eq!(Disk::new(10, 900, 100, 1100).ratio, 2.0);
    }
}
