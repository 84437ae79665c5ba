//! `neighbours`: runs commands in a quiet sandbox beside noisy ones.
//!
//! A fork bomb, a memory hog, a disk hog and a busy loop each run in a sandbox of their own. The quiet sandbox runs
//! `true` again and again, first alone, then beside each of them, then beside all.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::ensure;
use forkd_api::{Cpus, CreateSandboxes, ExecRequest, LimitsRequest, SandboxInfo};
use forkd_types::MiB;
use serde::Serialize;

use crate::daemon::{self, Daemon, MeasureArgs};
use crate::output::Findings;
use crate::report::Host;
use crate::stats::Spread;

const CLOCK: &str = "through the daemon's REST API, every sandbox with 1 vCPU; request: from sending the request to run \
                     `true` in the quiet sandbox to its answer, one after another; noise: the shell lines of the report, \
                     each in a sandbox of its own under the given CPU limit";

/// Each kind of noise with the shell line that makes it.
const NOISE: [(&str, &str); 4] = [
    ("fork bomb", "f() { f | f & }; while :; do f; done"),
    (
        "memory hog",
        "while :; do python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'; done",
    ),
    (
        "disk hog",
        "while :; do dd if=/dev/zero of=/var/hog bs=1M count=64 conv=fsync; rm /var/hog; done",
    ),
    ("busy loop", "while :; do :; done"),
];

#[derive(Debug, clap::Args)]
#[command(mut_arg("rounds", |arg| arg.help("Requests of each kind")))]
pub struct Args {
    /// Memory of each sandbox.
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    memory: MiB,

    /// CPU limit of each noisy sandbox [default: none].
    #[arg(long, value_name = "N")]
    cpus: Option<Cpus>,

    #[command(flatten)]
    measure: MeasureArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    neighbours: Vec<Neighbours>,
    conditions: Conditions,
}

/// Host, repetitions and definitions of a run.
#[derive(Debug, Serialize)]
struct Conditions {
    #[serde(flatten)]
    host: Host,
    memory_mib: u32,
    /// CPU limit of each noisy sandbox.
    cpus: Option<Cpus>,
    rounds: u8,
    noise: [(&'static str, &'static str); 4],
    clock: &'static str,
}

/// Results beside one kind of noise.
#[derive(Debug, Serialize)]
struct Neighbours {
    beside: &'static str,
    request_ms: Spread,
}

/// Runs the benchmark and prints its results.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let host = Host::here();
    let neighbours = daemon::run(&args.measure.daemon, "neighbours", async |daemon| {
        let parent = daemon.parent(args.memory).await?;
        let quiet = daemon.start(&parent).await?;
        let mut kinds: Vec<(&'static str, Vec<&str>)> = vec![("nothing", Vec::new())];
        kinds.extend(NOISE.map(|(name, line)| (name, vec![line])));
        kinds.push(("all of them", NOISE.map(|(_, line)| line).to_vec()));
        let mut results = Vec::new();
        for (beside, lines) in kinds {
            eprintln!("{} requests beside {beside}", args.measure.rounds);
            let noisy = make_noise(daemon, &parent, &lines, args.cpus).await?;
            let request_ms = measure(daemon, &quiet, args.measure.rounds).await?;
            daemon.end(noisy).await;
            results.push(Neighbours { beside, request_ms });
        }
        daemon.end(vec![quiet]).await;
        Ok(results)
    })?;
    let report = Report {
        neighbours,
        conditions: Conditions {
            host,
            memory_mib: args.memory.0,
            cpus: args.cpus,
            rounds: args.measure.rounds,
            noise: NOISE,
            clock: CLOCK,
        },
    };
    args.measure.output.print(&report)
}

/// Starts one sandbox for each line and runs the line in the background.
async fn make_noise(
    daemon: &Daemon,
    parent: &str,
    lines: &[&str],
    cpus: Option<Cpus>,
) -> anyhow::Result<Vec<SandboxInfo>> {
    let mut noisy = Vec::new();
    for line in lines {
        let request = CreateSandboxes {
            snapshot_tag: parent.to_owned(),
            limits: LimitsRequest {
                cpus,
                ..LimitsRequest::default()
            },
            ..CreateSandboxes::default()
        };
        let made = daemon.client.spawn(&request).await?;
        let started = format!(
            "setsid sh -c '{}' >/dev/null 2>&1 &",
            line.replace('\'', "'\\''")
        );
        for one in &made {
            run_line(daemon, one, &["sh", "-c", &started]).await?;
        }
        noisy.extend(made);
    }
    // The noise needs a moment to grow.
    tokio::time::sleep(Duration::from_secs(2)).await;
    Ok(noisy)
}

async fn measure(daemon: &Daemon, quiet: &SandboxInfo, rounds: u8) -> anyhow::Result<Spread> {
    let mut requests = Vec::new();
    for _ in 0..rounds {
        let begun = Instant::now();
        run_line(daemon, quiet, &["true"]).await?;
        requests.push(begun.elapsed());
    }
    Ok(Spread::of(&requests))
}

async fn run_line(daemon: &Daemon, sandbox: &SandboxInfo, args: &[&str]) -> anyhow::Result<()> {
    let request = ExecRequest {
        args: args.iter().map(ToString::to_string).collect(),
        timeout_secs: 300,
        ..ExecRequest::default()
    };
    let done = daemon.client.exec(&sandbox.id, &request).await?;
    ensure!(done.exit_code == 0, "{args:?} failed: {}", done.stderr);
    Ok(())
}

impl Findings for Report {
    fn text(&self) -> String {
        let c = &self.conditions;
        let limit = match c.cpus {
            Some(cpus) => format!("{} CPUs for each noisy one", f64::from(cpus)),
            None => "no limits".to_owned(),
        };
        let mut text = format!(
            "{}, {} MiB sandboxes, {limit}, {} requests\n\n",
            c.host.line(),
            c.memory_mib,
            c.rounds
        );
        let _ = writeln!(text, "{:<32} {:>9} {:>9} {:>9}", "ms", "p50", "p99", "max");
        for one in &self.neighbours {
            text.push_str(&one.request_ms.line(&format!("beside {}", one.beside)));
        }
        for (name, line) in c.noise {
            let _ = writeln!(text, "\n{name}: {line}");
        }
        let _ = writeln!(text, "\nclock: {}", c.clock);
        text
    }
}
