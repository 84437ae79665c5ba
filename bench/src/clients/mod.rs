//! `clients`: the same work through every client library, in one run.
//!
//! Each client is a process of its own that runs a worker (`worker.py`, `worker.mjs`) and prints its times. The libraries
//! are those of the given interpreters; a client without an interpreter is left out. `rest` is Python's `http.client`
//! with no library between: the other Python clients differ from it by their library alone.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use forkd_types::MiB;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::daemon::{self, MeasureArgs};
use crate::output::Findings;
use crate::report::Host;
use crate::stats::Spread;

const PYTHON: &str = include_str!("worker.py");
const NODE: &str = include_str!("worker.mjs");
/// The longest time of one worker.
const DEADLINE: Duration = Duration::from_secs(1800);

const CLOCK: &str = "in the client's process, from the call of the function until it returns; create: a sandbox of a \
                     warm parent, and the result of `true` in it; fork: a live fork into eight; rollback: to a \
                     checkpoint, with nothing changed since; commands: that many `true` at once in one sandbox, until \
                     all have ended; call: the record of a sandbox; raw call: the same by the HTTP module of the \
                     language, alternating with call; command: `true`, through each plane without a library";

#[derive(Debug, clap::Args)]
#[command(mut_arg("rounds", |arg| arg.default_value("5")))]
pub struct Args {
    /// Python interpreter; `forkd_sdk` and `e2b` are measured if it has them
    #[arg(long, default_value = "python3", value_name = "PROGRAM")]
    python: PathBuf,

    /// Node.js, for the TypeScript client
    #[arg(long, default_value = "node", value_name = "PROGRAM")]
    node: PathBuf,

    /// Compiled `index.js` of the TypeScript client
    #[arg(long, value_name = "FILE")]
    typescript: Option<PathBuf>,

    /// Commands at once
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    commands: u16,

    /// Small calls of each kind
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=10_000), value_name = "N")]
    calls: u16,

    /// Memory of the parent
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: MiB,

    #[command(flatten)]
    measure: MeasureArgs,
}

/// A line of a worker.
#[derive(Debug, Deserialize)]
struct Line {
    client: String,
    measure: String,
    ms: Vec<f64>,
}

/// Runs the benchmark and prints its results.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let host = Host::here();
    let url = args.measure.daemon.url().to_owned();
    let rows = daemon::run(&args.measure.daemon, "clients", async |daemon| {
        let tag = daemon.parent(args.memory).await?;
        // The daemon records the working set of a tag with its first child, which therefore takes longer.
        let first = daemon.start(&tag).await?;
        daemon.end(vec![first]).await;
        let mut rows = Vec::new();
        for client in ["rest", "python-sync", "python-async", "e2b", "typescript"] {
            let Some(mut worker) = args.worker(client).await else {
                eprintln!("{client} is not installed, and left out");
                continue;
            };
            eprintln!("{client}, {} rounds", args.measure.rounds);
            worker.command.args([&url, &tag]).args(
                [args.measure.rounds.into(), args.commands, args.calls]
                    .map(|number: u16| number.to_string()),
            );
            rows.extend(measure(client, worker).await?);
        }
        Ok(rows)
    })?;
    args.measure.output.print(&Report {
        clients: rows,
        conditions: Conditions {
            host,
            memory_mib: args.memory.0,
            rounds: args.measure.rounds,
            commands: args.commands,
            calls: args.calls,
            clock: CLOCK,
        },
    })
}

/// The process of a client, and the program that it reads from its standard input.
struct Worker {
    command: Command,
    program: &'static str,
}

impl Args {
    /// The worker of a client; `None` if its library is not installed.
    async fn worker(&self, client: &str) -> Option<Worker> {
        if client == "typescript" {
            let mut command = Command::new(&self.node);
            command.args(["--input-type=module", "-"]);
            command.arg(self.typescript.as_ref()?);
            return Some(Worker {
                command,
                program: NODE,
            });
        }
        let module = match client {
            "e2b" => "e2b",
            "rest" => "http.client",
            _ => "forkd_sdk",
        };
        if !has_module(&self.python, module).await {
            return None;
        }
        let mut command = Command::new(&self.python);
        command.args(["-", client]);
        Some(Worker {
            command,
            program: PYTHON,
        })
    }
}

async fn has_module(python: &Path, module: &str) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", &format!("import {module}")]);
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command.status().await.is_ok_and(|status| status.success())
}

/// Runs a worker to its end and reads its times.
async fn measure(client: &str, mut worker: Worker) -> anyhow::Result<Vec<Row>> {
    worker
        .command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    let mut child = worker
        .command
        .spawn()
        .with_context(|| format!("the worker of {client} cannot be started"))?;
    let mut input = child.stdin.take().context("the worker has no input")?;
    input.write_all(worker.program.as_bytes()).await?;
    drop(input);
    let ended = tokio::time::timeout(DEADLINE, child.wait_with_output())
        .await
        .with_context(|| format!("{client} took longer than {} s", DEADLINE.as_secs()))??;
    if !ended.status.success() {
        bail!("the worker of {client} failed: {}", ended.status);
    }
    let lines = ended.stdout.split(|byte| *byte == b'\n');
    let lines = lines.filter(|line| !line.is_empty());
    lines
        .map(|line| {
            let line: Line = serde_json::from_slice(line)
                .with_context(|| format!("the worker of {client} printed something else"))?;
            Ok(Row::of(line))
        })
        .collect()
}

/// The times of one measure through one client.
#[derive(Debug, Serialize)]
struct Row {
    client: String,
    measure: String,
    count: usize,
    ms: Spread,
}

impl Row {
    fn of(line: Line) -> Self {
        let times = line.ms.iter().map(|ms| Duration::from_secs_f64(ms / 1e3));
        Self {
            client: line.client,
            measure: line.measure,
            count: line.ms.len(),
            ms: Spread::of(&times.collect::<Vec<_>>()),
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    clients: Vec<Row>,
    conditions: Conditions,
}

/// Host, repetitions and definitions of a run.
#[derive(Debug, Serialize)]
struct Conditions {
    #[serde(flatten)]
    host: Host,
    memory_mib: u32,
    rounds: u8,
    commands: u16,
    calls: u16,
    clock: &'static str,
}

impl Report {
    /// Milliseconds by which a call of a library exceeds the same request without it.
    fn overheads(&self) -> BTreeMap<&str, f64> {
        let p50 = |client: &str, measure: &str| {
            let row = |row: &&Row| row.client == client && row.measure == measure;
            self.clients.iter().find(row).map(|row| row.ms.p50)
        };
        let mut found = BTreeMap::new();
        for row in self.clients.iter().filter(|row| row.measure == "call") {
            if let Some(raw) = p50(&row.client, "raw call") {
                found.insert(row.client.as_str(), row.ms.p50 - raw);
            }
        }
        let planes = p50("rest", "command, REST").zip(p50("rest", "command, E2B plane"));
        if let Some((rest, e2b)) = planes {
            found.insert("E2B plane", e2b - rest);
        }
        found
    }
}

impl Findings for Report {
    fn text(&self) -> String {
        let c = &self.conditions;
        let mut text = format!(
            "{}, {} MiB parent, {} rounds, {} commands at once, {} calls\n\n{:<34} {:>9} {:>9} {:>9}\n",
            c.host.line(),
            c.memory_mib,
            c.rounds,
            c.commands,
            c.calls,
            "ms",
            "p50",
            "p99",
            "max"
        );
        for row in &self.clients {
            let name = format!("{} {}", row.client, row.measure);
            text.push_str(&row.ms.line(&name));
        }
        text.push_str("\nlonger than the same request without a library, p50:\n");
        for (client, ms) in self.overheads() {
            let _ = writeln!(text, "{client:<32} {ms:>9.2}");
        }
        let _ = writeln!(text, "\nclock: {}", c.clock);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(client: &str, measure: &str, ms: f64) -> Row {
        Row::of(Line {
            client: client.into(),
            measure: measure.into(),
            ms: vec![ms],
        })
    }

    #[test]
    fn overheads_are_differences_within_one_client() {
        let report = Report {
            clients: vec![
                row("a", "call", 3.0),
                row("a", "raw call", 2.5),
                row("b", "call", 9.0),
                row("rest", "command, REST", 50.0),
                row("rest", "command, E2B plane", 50.5),
            ],
            conditions: Conditions {
                host: Host::here(),
                memory_mib: 1,
                rounds: 1,
                commands: 1,
                calls: 1,
                clock: CLOCK,
            },
        };
        let found = report.overheads();
        assert_eq!(
            found.keys().copied().collect::<Vec<_>>(),
            ["E2B plane", "a"]
        );
        assert!(
            found.values().all(|ms| (ms - 0.5).abs() < 0.01),
            "{found:?}"
        );
        assert!(report.text().contains("E2B plane"));
    }
}
