//! `count`: what one operation costs in counts, which do not depend on the speed or load of the host.
//!
//! Each operation runs twice as often as asked for. The first half is counted by the kernel, KVM and the
//! devices. The second half runs under `strace`, which changes the other counts, and counts system calls.
//! The report has the median of each count over the rounds.
//!
//! `forkd-vmm` is counted for the processes of the operation's sandboxes: shells that refill the pool are left
//! out. A shell that becomes a child is counted from the request on.

mod act;
mod process;
mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, bail};
use forkd_types::MiB;
use serde::Serialize;

use crate::daemon::{self, Daemon, DaemonArgs};
use crate::deadline::Deadline;
use crate::output::{Findings, OutputArgs};
use crate::report::Host;
use act::{Operation, Stage};
use process::{Counts, Process};
use trace::Trace;

/// How often an operation that fails is counted again.
const RETRIES: u32 = 5;

const DEFINITION: &str = "median over the rounds of what one operation adds, from the request to its answer; \
    controller, spawn, vmm: the process of that name; minor_faults, major_faults, context_switches, reads, writes, \
    written_bytes: /proc/PID; system_calls, syncs: strace, in rounds of their own; kvm: KVM's statistics of the \
    operation's VMs; vsock, disk: counters of the devices; guest.private_pages: pages of guest memory that the newest \
    sandbox does not share, at the end of the operation";

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Operations to count [default: all]
    #[arg(value_enum, value_name = "OPERATION")]
    operations: Vec<Operation>,

    /// Rounds of each operation
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=100))]
    n: u8,

    /// Memory of the parent
    #[arg(long, default_value = "512M", value_name = "SIZE")]
    memory: MiB,

    /// Memory that the source changes before it is forked, branched or rolled back
    #[arg(long, default_value = "8M", value_name = "SIZE")]
    dirty: MiB,

    /// Fail if a count exceeds its bound in this file (JSON: operation, count, bound)
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,

    #[command(flatten)]
    daemon: DaemonArgs,

    #[command(flatten)]
    output: OutputArgs,
}

/// Upper bounds by operation and count.
type Bounds = BTreeMap<String, BTreeMap<String, u64>>;

/// Runs the benchmark and prints its results.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let bounds = args.check.as_deref().map(read_bounds).transpose()?;
    let host = Host::here();
    let deadline = Deadline::of(&host);
    let wanted = match args.operations.as_slice() {
        [] => &Operation::ALL[..],
        some => some,
    };
    let count = daemon::run(&args.daemon, "count", async |daemon| {
        let tag = parent(daemon, args.memory, deadline).await?;
        let mut all = BTreeMap::new();
        for &operation in wanted {
            eprintln!("{operation}, {} rounds", args.n);
            let stage = Stage {
                daemon,
                tag: &tag,
                dirty: args.dirty,
            };
            let counted = retried(daemon, deadline, &stage, operation, args.n).await?;
            all.insert(operation.to_string(), counted);
        }
        Ok(all)
    })?;
    let report = Report {
        count,
        conditions: Conditions {
            host,
            memory_mib: args.memory.0,
            dirty_mib: args.dirty.0,
            rounds: args.n,
            definition: DEFINITION,
        },
    };
    args.output.print(&report)?;
    match bounds {
        Some(bounds) => check(&report.count, &bounds, wanted),
        None => Ok(()),
    }
}

async fn parent(daemon: &Daemon, memory: MiB, deadline: Deadline) -> anyhow::Result<String> {
    for attempt in 0..=RETRIES {
        let name = format!("parent{attempt}");
        let made = async {
            let tag = daemon.parent_named(&name, memory).await?;
            // The first child of a tag also records its working set.
            daemon.end(daemon.spawn(&tag, 1).await?).await;
            Ok(tag)
        };
        match deadline.times(2).within(made).await {
            Ok(tag) => return Ok(tag),
            Err(error) => eprintln!("the parent is made again: {error:#}"),
        }
        daemon.end_all().await;
    }
    bail!("no parent after {RETRIES} retries")
}

async fn retried(
    daemon: &Daemon,
    deadline: Deadline,
    stage: &Stage<'_>,
    operation: Operation,
    rounds: u8,
) -> anyhow::Result<Counts> {
    for _ in 0..=RETRIES {
        let limit = deadline.times(2 * u32::from(rounds));
        match limit.within(counted(stage, operation, rounds)).await {
            Ok(counts) => return Ok(counts),
            Err(error) => eprintln!("{operation} is counted again: {error:#}"),
        }
        daemon.end_all().await;
    }
    bail!("{operation} failed {RETRIES} times in a row")
}

async fn counted(stage: &Stage<'_>, operation: Operation, rounds: u8) -> anyhow::Result<Counts> {
    let mut all: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for round in 0..2 * rounds {
        let counts = if round < rounds {
            by_kernel(stage, operation, round).await?
        } else {
            by_strace(stage, operation, round).await?
        };
        for (name, value) in counts {
            all.entry(name).or_default().push(value);
        }
    }
    Ok(all
        .into_iter()
        .map(|(name, mut values)| {
            values.sort_unstable();
            let median = values[(values.len() - 1) / 2];
            (name, median)
        })
        .collect())
}

/// One round with the counts of the kernel, KVM and the devices.
async fn by_kernel(stage: &Stage<'_>, operation: Operation, round: u8) -> anyhow::Result<Counts> {
    let ready = stage.prepare(operation).await?;
    let processes = process::of_forkd();
    // Without a sandbox the metrics still show the counts of the last one.
    let devices_before = if ready.is_empty() {
        Counts::new()
    } else {
        devices(stage.daemon).await?
    };
    let before: Vec<Counts> = processes.iter().map(process::counts).collect();
    let made = stage.act(operation, &ready, round).await?;
    let after: Vec<Counts> = processes.iter().map(process::counts).collect();
    let pids: BTreeSet<u32> = ready
        .iter()
        .chain(&made)
        .filter_map(|one| one.pid)
        .collect();
    let mut all = Counts::new();
    for ((process, before), after) in processes.iter().zip(&before).zip(&after) {
        if process.program != "vmm" || pids.contains(&process.pid) {
            add_difference(&mut all, before, after);
        }
    }
    let newest = made.first().or(ready.first()).and_then(|one| one.pid);
    if let Some(pages) = newest.and_then(process::private_guest_pages) {
        all.insert("guest.private_pages".to_owned(), pages);
    }
    add_difference(&mut all, &devices_before, &devices(stage.daemon).await?);
    stage
        .daemon
        .end(ready.into_iter().chain(made).collect())
        .await;
    Ok(all)
}

/// One round with the system calls.
async fn by_strace(stage: &Stage<'_>, operation: Operation, round: u8) -> anyhow::Result<Counts> {
    let ready = stage.prepare(operation).await?;
    let processes: Vec<Process> = process::of_forkd();
    let mut traces = Vec::new();
    for program in ["controller", "vmm"] {
        traces.extend(Trace::attach(program, &processes).await?);
    }
    let made = stage.act(operation, &ready, round).await;
    let mut all = Counts::new();
    for trace in traces {
        all.extend(trace.finish()?);
    }
    stage
        .daemon
        .end(ready.into_iter().chain(made?).collect())
        .await;
    Ok(all)
}

fn add_difference(all: &mut Counts, before: &Counts, after: &Counts) {
    for (name, value) in after {
        let earlier = before.get(name).copied().unwrap_or(0);
        *all.entry(name.clone()).or_default() += value.saturating_sub(earlier);
    }
}

/// The counters of all VMs from the daemon's metrics, as `DEVICE.COUNTER`.
async fn devices(daemon: &Daemon) -> anyhow::Result<Counts> {
    let text = daemon.client.metrics().await?;
    Ok(text.lines().filter_map(device_line).collect())
}

/// Reads `forkd_vmm_device{device="kvm",counter="exits"} 17`; `None` for other metrics.
fn device_line(line: &str) -> Option<(String, u64)> {
    let (labels, value) = line.strip_prefix("forkd_vmm_device{")?.split_once("} ")?;
    let label = |name: &str| {
        labels.split(',').find_map(|pair| {
            pair.strip_prefix(name)?
                .strip_prefix("=\"")?
                .strip_suffix('"')
        })
    };
    let device = label("device")?;
    if !matches!(device, "kvm" | "vsock" | "disk") {
        return None;
    }
    let value: f64 = value.trim().parse().ok()?;
    Some((format!("{device}.{}", label("counter")?), value as u64))
}

fn read_bounds(path: &std::path::Path) -> anyhow::Result<Bounds> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{} does not hold bounds", path.display()))
}

/// Fails with every count that exceeds its bound. A bound without a count fails too: it would check nothing.
fn check(
    counted: &BTreeMap<String, Counts>,
    bounds: &Bounds,
    wanted: &[Operation],
) -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    for operation in wanted {
        let name = operation.to_string();
        for (count, bound) in bounds.get(&name).into_iter().flatten() {
            match counted.get(&name).and_then(|counts| counts.get(count)) {
                Some(value) if value <= bound => {}
                Some(value) => wrong.push(format!("{name}: {count} is {value}, bound {bound}")),
                None => wrong.push(format!("{name}: {count} was not counted")),
            }
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("counts exceed their bounds: {}", wrong.join("; "))
}

#[derive(Debug, Serialize)]
struct Report {
    count: BTreeMap<String, Counts>,
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
    definition: &'static str,
}

impl Findings for Report {
    fn text(&self) -> String {
        let c = &self.conditions;
        let mut text = format!(
            "{}, {} MiB parent, {} MiB dirty, {} rounds\n\n{:<32}",
            c.host.line(),
            c.memory_mib,
            c.dirty_mib,
            c.rounds,
            "count"
        );
        for operation in self.count.keys() {
            let _ = write!(text, " {operation:>10}");
        }
        text.push('\n');
        let names: BTreeSet<&String> = self.count.values().flat_map(BTreeMap::keys).collect();
        for name in names {
            let values: Vec<u64> = self
                .count
                .values()
                .map(|counts| counts.get(name).copied().unwrap_or(0))
                .collect();
            if values.iter().all(|value| *value == 0) {
                continue;
            }
            let _ = write!(text, "{name:<32}");
            for value in values {
                let _ = write!(text, " {value:>10}");
            }
            text.push('\n');
        }
        let _ = writeln!(text, "\ncounts: {}", c.definition);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_counters_are_read_from_metrics() {
        let line = r#"forkd_vmm_device{device="kvm",counter="exits"} 17"#;
        assert_eq!(device_line(line), Some(("kvm.exits".to_owned(), 17)));
        let turned = r#"forkd_vmm_device{counter="pf_taken",device="kvm"} 3"#;
        assert_eq!(device_line(turned), Some(("kvm.pf_taken".to_owned(), 3)));
        assert_eq!(device_line("forkd_pool_ready 8"), None);
        assert_eq!(
            device_line(r#"forkd_vmm_device{device="rng",counter="x"} 1"#),
            None
        );
    }

    #[test]
    fn a_count_above_its_bound_or_missing_fails() {
        let counts = |value| {
            let spawn = Counts::from([("vmm.syncs".to_owned(), value)]);
            BTreeMap::from([("spawn".to_owned(), spawn)])
        };
        let bounds: Bounds = serde_json::from_str(r#"{"spawn": {"vmm.syncs": 2}}"#).unwrap();
        let verdict = |value| check(&counts(value), &bounds, &[Operation::Spawn]);
        assert!(verdict(2).is_ok());
        let error = verdict(3).unwrap_err().to_string();
        assert!(error.ends_with("spawn: vmm.syncs is 3, bound 2"), "{error}");
        let none = check(&BTreeMap::new(), &bounds, &[Operation::Spawn]).unwrap_err();
        assert!(none.to_string().contains("was not counted"), "{none}");
        // An operation that did not run is not judged.
        assert!(check(&BTreeMap::new(), &bounds, &[Operation::Exec]).is_ok());
    }
}
