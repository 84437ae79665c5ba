//! `forkd-bench`: the benchmarks behind `forkd bench`.
//!
//! Every benchmark prints its numbers, its conditions and the definition of each clock, as text or as JSON.
//! `primitives` needs `/dev/kvm` only and `net` root only; the others need a daemon. Comparisons are measured in the same run.

mod branch;
mod chain;
mod chart;
mod children;
mod clients;
mod count;
mod daemon;
mod deadline;
mod expected;
mod floor;
mod fork;
mod frozen;
mod history;
mod neighbours;
mod net;
mod operations;
mod output;
mod report;
mod rollback;
mod source;
mod spawned;
mod stats;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Parser, Subcommand};
use forkd_types::MiB;
use output::OutputArgs;
use report::{Conditions, Fork, PagesFrom, Primitives};
use rustix::process::{Resource, getrlimit, setrlimit};
use stats::millis;

/// Measures forkd and prints what each clock covers.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Measure the fork path with a guest of a few bytes; needs /dev/kvm only.
    Primitives(PrimitivesArgs),
    /// Measure children of a warm Python parent, through the daemon.
    Fork(children::Args),
    /// Measure each main operation from its request to its answer, through the daemon.
    Operations(operations::Args),
    /// Count faults, exits, system calls, syncs and pages of each main operation, through the daemon.
    Count(count::Args),
    /// Measure branches of a running sandbox, through the daemon.
    Branch(branch::Args),
    /// Measure roll-backs of a running sandbox, through the daemon.
    Rollback(rollback::Args),
    /// Measure a quiet sandbox beside noisy ones, through the daemon.
    Neighbours(neighbours::Args),
    /// Measure the client libraries and the E2B protocol, through the daemon.
    Clients(clients::Args),
    /// Measure the network engine beside a tap device with NAT; needs root, and no guest.
    Net(net::Args),
    /// Measure the cost of the depth of a chain of snapshots, through the daemon.
    Chain(chain::Args),
    /// Run one child of the floor measurement.
    #[command(name = floor::CHILD, hide = true)]
    FloorChild {
        /// Memory of the guest.
        memory: MiB,
    },
}

#[derive(Debug, clap::Args)]
struct PrimitivesArgs {
    /// Sizes of the bursts.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100, 1000], value_name = "N,…")]
    n: Vec<usize>,

    /// Memory of the guest.
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: MiB,

    /// Rounds of each burst.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..=100))]
    rounds: u8,

    /// Sizes of the guests that are cut.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "512M,1536M",
        value_name = "SIZE,…"
    )]
    cut_memory: Vec<MiB>,

    /// Memory of a guest that changes between cuts.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8M,30M,300M",
        value_name = "SIZE,…"
    )]
    cut_dirty: Vec<MiB>,

    /// Memory of a guest that changes before a roll-back.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8M,80M",
        value_name = "SIZE,…"
    )]
    rollback_dirty: Vec<MiB>,

    /// Cuts and roll-backs of each kind; 0 for none.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u8).range(0..=40))]
    cuts: u8,

    #[command(flatten)]
    output: OutputArgs,

    /// Also draw the forks to this SVG file.
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,

    /// Folder for images and sockets [default: a folder in memory].
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    work: PathBuf,
}

fn main() -> anyhow::Result<()> {
    match Args::parse().what {
        What::FloorChild { memory } => floor::child(memory),
        What::Primitives(args) => primitives(&args),
        What::Fork(args) => children::run(&args),
        What::Operations(args) => operations::run(&args),
        What::Count(args) => count::run(&args),
        What::Branch(args) => branch::run(&args),
        What::Rollback(args) => rollback::run(&args),
        What::Chain(args) => chain::run(&args),
        What::Clients(args) => clients::run(&args),
        What::Net(args) => net::run(&args),
        What::Neighbours(args) => neighbours::run(&args),
    }
}

fn primitives(args: &PrimitivesArgs) -> anyhow::Result<()> {
    raise_file_limit();
    let conditions = Conditions::here(args.memory.0, args.rounds.into());
    let work = tempfile::Builder::new()
        .prefix("forkd-bench-")
        .tempdir_in(&args.work)
        .with_context(|| format!("cannot work in {}", args.work.display()))?;
    let image = tempfile::tempfile_in(work.path())?;
    forkd_probe::floor::write_tiny_image(&image, args.memory.bytes())?;
    let mut results = Vec::new();
    for &n in &args.n {
        let folder = work.path().join(n.to_string());
        std::fs::create_dir(&folder)?;
        let mut bench = fork::Bench::new(&folder, args.memory)?;
        let (mut ours, mut floors, mut fill) = (Vec::new(), Vec::new(), Vec::new());
        for round in 1..=args.rounds {
            eprintln!("{n} forks, round {round} of {}", args.rounds);
            floors.push(floor::burst(&image, args.memory, n)?);
            let (burst, filled) = bench.burst(n)?;
            ours.push(burst);
            fill.push(millis(filled));
        }
        ours.sort_by_key(|burst| burst.wall);
        floors.sort_by_key(|burst| burst.wall);
        fill.sort_by(f64::total_cmp);
        results.push(Fork::new(n, &ours[0], &floors[0], fill[0]));
    }
    let mut report = Primitives {
        fork: results,
        cut: Vec::new(),
        rollback: Vec::new(),
        conditions,
    };
    measure_history(args, work.path(), &mut report)?;
    if let Some(path) = &args.chart {
        report.chart().write(path)?;
    }
    args.output.print(&report)
}

fn measure_history(
    args: &PrimitivesArgs,
    work: &std::path::Path,
    report: &mut Primitives,
) -> anyhow::Result<()> {
    let rounds = usize::from(args.cuts);
    if rounds == 0 {
        return Ok(());
    }
    for &memory in &args.cut_memory {
        for &dirty in &args.cut_dirty {
            eprintln!("{rounds} cuts of {memory} with {dirty} dirty");
            report.cut.push(history::cuts(work, memory, dirty, rounds)?);
        }
    }
    for &dirty in &args.rollback_dirty {
        for from in [PagesFrom::Image, PagesFrom::Checkpoint] {
            eprintln!("{rounds} roll-backs with {dirty} dirty");
            let measured = history::rollbacks(work, args.memory, dirty, from, rounds)?;
            report.rollback.push(measured);
        }
    }
    Ok(())
}

/// A thousand children need several thousand descriptors.
fn raise_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        eprintln!("the limit on open files stays as it is: {error}");
    }
}
