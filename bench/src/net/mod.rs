//! `forkd bench net`: the network engine beside a tap device with NAT, in the same run, without a guest.
//!
//! ```text
//!   client in a namespace ── tap ── pump ── socket pair ── forkd-net ── server     engine
//!   client in a namespace ── tap ── pump ── tap, routing, NAT, veth  ── server     NAT
//! ```
//!
//! The pump stands for a VMM: it moves frames of up to 64 KiB between two descriptors. The CPU time of a path is that of
//! its pump and of the engine. Needs root and `/dev/net/tun`; everything happens in namespaces that the benchmark makes.

mod engine;
mod pump;
mod traffic;
mod world;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;

use crate::output::{Findings, OutputArgs};
use crate::report::Host;
use crate::stats::Spread;
use engine::Engine;
use pump::Pump;
use traffic::Way;
use world::World;

const GIB: f64 = (1u64 << 30) as f64;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// MiB to send in each direction and round.
    #[arg(long, default_value_t = 512, value_name = "MIB")]
    size: u64,

    /// Rounds of each path, in turns.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=50))]
    rounds: u8,

    /// Connections for the latency of each path.
    #[arg(long, default_value_t = 300, value_name = "N")]
    connections: u32,

    /// Sandboxes to attach.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    sandboxes: u32,

    /// The engine [default: forkd-net beside this program].
    #[arg(long, value_name = "PROGRAM")]
    engine: Option<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,
}

/// The measurements of one path.
#[derive(Debug, Default, Serialize)]
struct Path {
    /// Gigabits per second from the client, each round.
    up_gbit: Vec<f64>,
    down_gbit: Vec<f64>,
    /// CPU seconds of pump and engine per GiB, each round.
    up_cpu: Vec<f64>,
    down_cpu: Vec<f64>,
    /// From `connect` until one byte came back.
    connect_ms: Option<Spread>,
}

#[derive(Debug, Serialize)]
struct Found {
    host: Host,
    clock: &'static str,
    /// The second path has NAT; without the program `nft` it only routes.
    nat: bool,
    size_mib: u64,
    engine: Path,
    tap: Path,
    /// Median throughput of the engine over that of the other path.
    throughput_ratio: [f64; 2],
    /// Median CPU time per GiB of the engine over that of the other path.
    cpu_ratio: [f64; 2],
    attach: engine::Attach,
}

pub fn run(args: &Args) -> anyhow::Result<()> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let program = match &args.engine {
        Some(program) => program.clone(),
        None => own.with_file_name("forkd-net"),
    };
    let host = Host::here();
    let world = World::make()?;
    let engine = Engine::start(&program, &world)?;
    let attach = engine.attach_many(args.sandboxes)?;
    let (guest, frames) = engine.attach("sb-bench")?;
    let through_engine = Pump::start(world.tap(world::GUEST)?, guest)?;
    world.address(world::GUEST)?;
    let through_nat = Pump::start(world.tap(world::NAT_GUEST)?, world.tap(world::NAT_HOST)?)?;
    world.address(world::NAT_GUEST)?;
    let nat = world.route()?;
    traffic::serve(&world)?;
    let (mut ours, mut tap) = (Path::default(), Path::default());
    for _ in 0..args.rounds {
        let cpu = || Ok(through_engine.cpu() + engine.cpu()?);
        round(&world, world::GUEST, args.size, cpu, &mut ours)?;
        round(
            &world,
            world::NAT_GUEST,
            args.size,
            || Ok(through_nat.cpu()),
            &mut tap,
        )?;
    }
    ours.connect_ms = Some(traffic::connect(&world, world::GUEST, args.connections)?);
    tap.connect_ms = Some(traffic::connect(
        &world,
        world::NAT_GUEST,
        args.connections,
    )?);
    drop(frames);
    let found = Found {
        host,
        clock: CLOCK,
        nat,
        size_mib: args.size,
        throughput_ratio: [
            median(&ours.up_gbit) / median(&tap.up_gbit),
            median(&ours.down_gbit) / median(&tap.down_gbit),
        ],
        cpu_ratio: [
            median(&ours.up_cpu) / median(&tap.up_cpu),
            median(&ours.down_cpu) / median(&tap.down_cpu),
        ],
        engine: ours,
        tap,
        attach,
    };
    args.output.print(&found)
}

const CLOCK: &str = "throughput: from the first byte sent to the answer to the last one, one connection; CPU: user and \
    system time of the pump's threads and of the engine, without client and server; connect: until one byte came \
    back; attach: socket pair, message to the engine, answer";

/// Sends bytes up and down once.
fn round(
    world: &World,
    from: &'static str,
    mib: u64,
    cpu: impl Fn() -> anyhow::Result<Duration>,
    path: &mut Path,
) -> anyhow::Result<()> {
    let bytes = mib << 20;
    for way in [Way::Up, Way::Down] {
        let before = cpu()?;
        let took = traffic::transfer(world, from, way, bytes)?;
        let used = cpu()?.saturating_sub(before);
        let gbit = bytes as f64 * 8.0 / took.as_secs_f64() / 1e9;
        let per_gib = used.as_secs_f64() * GIB / bytes as f64;
        let (rates, costs) = match way {
            Way::Up => (&mut path.up_gbit, &mut path.up_cpu),
            Way::Down => (&mut path.down_gbit, &mut path.down_cpu),
        };
        rates.push(gbit);
        costs.push(per_gib);
    }
    Ok(())
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

impl Findings for Found {
    fn text(&self) -> String {
        let other = if self.nat {
            "tap and NAT"
        } else {
            "tap, routed"
        };
        let mut text = format!("{}\n{}\n\n", self.host.line(), self.clock);
        text += &format!("{:<34} {:>10} {other:>12} {:>7}\n", "", "engine", "ratio");
        let mut line = |what: &str, ours: f64, theirs: f64| {
            let ratio = ours / theirs;
            text += &format!("{what:<34} {ours:>10.3} {theirs:>12.3} {ratio:>7.2}\n");
        };
        let (ours, tap) = (&self.engine, &self.tap);
        line(
            "Gbit/s up, median",
            median(&ours.up_gbit),
            median(&tap.up_gbit),
        );
        line(
            "Gbit/s down, median",
            median(&ours.down_gbit),
            median(&tap.down_gbit),
        );
        line(
            "CPU s per GiB up, median",
            median(&ours.up_cpu),
            median(&tap.up_cpu),
        );
        line(
            "CPU s per GiB down, median",
            median(&ours.down_cpu),
            median(&tap.down_cpu),
        );
        if let (Some(ours), Some(tap)) = (&ours.connect_ms, &tap.connect_ms) {
            line("connect and one byte, ms p50", ours.p50, tap.p50);
            line("connect and one byte, ms p99", ours.p99, tap.p99);
        }
        text + &self.attach.text()
    }
}
