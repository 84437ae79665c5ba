//! The results of `primitives`, as text and as JSON.
//!
//! [`Host`] and [`Conditions`] describe where and how a run was measured, with the definition of each clock.

use std::fmt::Write as _;
use std::time::Duration;

use forkd_vmm_proto::PauseParts;
use serde::Serialize;

use crate::chart::Chart;
use crate::floor::Burst;
use crate::output::Findings;
use crate::stats::{Spread, millis};

/// The results of `primitives`.
#[derive(Debug, Serialize)]
pub struct Primitives {
    /// Bursts of forks, smallest first.
    pub fork: Vec<Fork>,
    /// Cuts of a running guest.
    pub cut: Vec<Cut>,
    /// Roll-backs in place.
    pub rollback: Vec<Rollback>,
    pub conditions: Conditions,
}

/// Cuts of one guest size and one amount of change.
#[derive(Debug, Serialize)]
pub struct Cut {
    pub mib: u32,
    /// Memory that changed since the previous cut.
    pub dirty_mib: u32,
    /// From the first vCPU stopped to the last one running again.
    pub pause_ms: Spread,
    /// Parts of the pause: the median of each.
    pub parts_ms: Parts,
}

/// Roll-backs of one amount of change.
#[derive(Debug, Serialize)]
pub struct Rollback {
    /// Memory that changed since the checkpoint.
    pub dirty_mib: u32,
    pub from: PagesFrom,
    /// Number of pages restored.
    pub pages: u64,
    /// From the first vCPU stopped to the last one running again.
    pub ms: Spread,
    /// Parts of the pause: the median of each.
    pub parts_ms: Parts,
}

/// Parts of a pause.
#[derive(Debug, Serialize)]
pub struct Parts {
    /// Until vCPUs and devices have stopped.
    pub stop: f64,
    /// Reading or loading the state of vCPUs and devices.
    pub state: f64,
    /// Finding the changed pages.
    pub scan: f64,
    /// Keeping the memory (a fork), or restoring it.
    pub memory: f64,
    /// Until the vCPUs are told to go on.
    pub start: f64,
}

impl Parts {
    pub fn of(parts: &[PauseParts]) -> Self {
        let median = |part: fn(&PauseParts) -> u64| {
            let times: Vec<Duration> = parts.iter().map(part).map(Duration::from_micros).collect();
            Spread::of(&times).p50
        };
        Self {
            stop: median(|p| p.stop_us),
            state: median(|p| p.state_us),
            scan: median(|p| p.scan_us),
            memory: median(|p| p.memory_us),
            start: median(|p| p.start_us),
        }
    }
}

/// Where the pages of a roll-back come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PagesFrom {
    /// The pages were unchanged at the checkpoint: changes are dropped.
    Image,
    /// The pages had changed before the checkpoint: they are copied back.
    Checkpoint,
}

/// Results of one burst size.
#[derive(Debug, Serialize)]
pub struct Fork {
    /// Number of children at once.
    pub n: usize,
    /// From the request for the first shell to the first instruction of the last child.
    pub wall_ms: f64,
    /// From the request for a shell to the child's first instruction.
    pub ms: Spread,
    /// The bare system calls for the same burst, in the same run.
    pub floor_wall_ms: f64,
    /// The bare system calls for each child.
    pub floor_ms: Spread,
    /// `wall_ms` over `floor_wall_ms`.
    pub ratio: f64,
    /// How long the pool took to fill before the clock started.
    pub pool_fill_ms: f64,
}

impl Fork {
    /// Combines the best of several rounds of each side.
    pub fn new(n: usize, ours: &Burst, floor: &Burst, pool_fill_ms: f64) -> Self {
        let (wall_ms, floor_wall_ms) = (millis(ours.wall), millis(floor.wall));
        Self {
            n,
            wall_ms,
            ms: Spread::of(&ours.each),
            floor_wall_ms,
            floor_ms: Spread::of(&floor.each),
            ratio: wall_ms / floor_wall_ms,
            pool_fill_ms,
        }
    }
}

/// The host of a run.
#[derive(Debug, Serialize)]
pub struct Host {
    /// CPU as the kernel names it.
    pub cpu: String,
    pub cores: usize,
    pub kernel: String,
    /// The probe's verdict on `/dev/kvm`.
    pub kvm: &'static str,
    /// One-minute load average at the start of the run.
    pub load: f64,
    /// The meaning of a second in this run: `host` (ordinary time) or `instructions` (2 ns for each executed
    /// instruction, in a machine that was started with `--clock instructions`).
    pub time: &'static str,
}

impl Host {
    /// Collects the facts of this host.
    pub fn here() -> Self {
        Self {
            cpu: cpu_model(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            kvm: forkd_probe::probe().verdict.as_str(),
            load: first_number("/proc/loadavg"),
            time: clock_of(&std::fs::read_to_string("/proc/cmdline").unwrap_or_default()),
        }
    }

    /// Whether time is counted in instructions.
    pub fn counts_instructions(&self) -> bool {
        self.time == INSTRUCTIONS
    }

    /// All facts in one line.
    pub fn line(&self) -> String {
        format!(
            "{} x{}, Linux {}, /dev/kvm {}, load {:.1}, time: {}",
            self.cpu, self.cores, self.kernel, self.kvm, self.load, self.time
        )
    }
}

const INSTRUCTIONS: &str = "instructions";

/// The clock that `forkd machine` names on the kernel's command line.
fn clock_of(command_line: &str) -> &'static str {
    let named = command_line
        .split_ascii_whitespace()
        .find_map(|word| word.strip_prefix("forkd.clock="));
    match named {
        Some(INSTRUCTIONS) => INSTRUCTIONS,
        _ => "host",
    }
}

/// Host, repetitions and definitions of a run.
#[derive(Debug, Serialize)]
pub struct Conditions {
    #[serde(flatten)]
    pub host: Host,
    pub memory_mib: u32,
    /// Rounds of each burst; the fastest wall time of each side counts.
    pub rounds: usize,
    /// Definition of each clock.
    pub clock: &'static str,
}

impl Conditions {
    /// The conditions of a run on this host.
    pub fn here(memory_mib: u32, rounds: usize) -> Self {
        Self {
            host: Host::here(),
            memory_mib,
            rounds,
            clock: "fork: from asking forkd-spawn for the shell until the child's first instruction has \
                    signalled the asking process; pooled shells, one process per VM, own console file and \
                    vsock socket each; floor: mmap, registers, KVM_RUN to the first port write, one process \
                    per VM, told and answering over a socket; cut and rollback: from the order to the first \
                    vCPU to stop until the last one was told to go on, a guest of 1 vCPU that writes to every \
                    page of its dirty set all the time, each cut onto the one before",
        }
    }
}

impl Primitives {
    /// The forks beside their floor.
    pub fn chart(&self) -> Chart {
        let group = |fork: &Fork| {
            let name = match fork.n {
                1 => "1 fork".to_owned(),
                n => format!("{n} forks"),
            };
            (name, vec![fork.wall_ms, fork.floor_wall_ms])
        };
        Chart {
            title: "From the request to the last child's first instruction".to_owned(),
            unit: "ms",
            series: vec!["forkd", "bare KVM system calls, same run"],
            groups: self.fork.iter().map(group).collect(),
            footer: self.conditions.host.line(),
        }
    }
}

impl Findings for Primitives {
    fn text(&self) -> String {
        let mut text = String::new();
        let c = &self.conditions;
        let _ = writeln!(
            text,
            "{}, {} MiB guests, best of {} rounds\n",
            c.host.line(),
            c.memory_mib,
            c.rounds
        );
        let _ = writeln!(
            text,
            "{:>6} {:>10} {:>8} {:>8} {:>8} {:>12} {:>6} {:>11}",
            "forks", "wall ms", "p50 ms", "p99 ms", "max ms", "floor ms", "ratio", "pool fill"
        );
        for fork in &self.fork {
            let _ = writeln!(
                text,
                "{:>6} {:>10.2} {:>8.2} {:>8.2} {:>8.2} {:>12.2} {:>6.2} {:>8.0} ms",
                fork.n,
                fork.wall_ms,
                fork.ms.p50,
                fork.ms.p99,
                fork.ms.max,
                fork.floor_wall_ms,
                fork.ratio,
                fork.pool_fill_ms
            );
        }
        self.history_text(&mut text);
        let _ = writeln!(text, "\nclock: {}", c.clock);
        text
    }
}

impl Primitives {
    fn history_text(&self, text: &mut String) {
        let _ = writeln!(
            text,
            "\n{:<40} {:>8} {:>8} {:>8}   {:>6} {:>6} {:>6} {:>6} {:>6}",
            "pause in ms", "p50", "p99", "max", "stop", "state", "scan", "memory", "start"
        );
        let mut line = |what: String, ms: &Spread, parts: &Parts| {
            let _ = writeln!(
                text,
                "{what:<40} {:>8.2} {:>8.2} {:>8.2}   {:>6.2} {:>6.2} {:>6.2} {:>6.2} {:>6.2}",
                ms.p50,
                ms.p99,
                ms.max,
                parts.stop,
                parts.state,
                parts.scan,
                parts.memory,
                parts.start
            );
        };
        for cut in &self.cut {
            let what = format!("cut, {} MiB, {} MiB dirty", cut.mib, cut.dirty_mib);
            line(what, &cut.pause_ms, &cut.parts_ms);
        }
        for back in &self.rollback {
            let from = match back.from {
                PagesFrom::Image => "dropped",
                PagesFrom::Checkpoint => "copied",
            };
            let what = format!("roll back, {} MiB dirty, {from}", back.dirty_mib);
            line(what, &back.ms, &back.parts_ms);
        }
    }
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split_once(':'))
        .map_or("unknown", |(_, name)| name.trim())
        .to_owned()
}

fn first_number(path: &str) -> f64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or(0.0)
}
