//! The results of `fork`, as text and as JSON.
//!
//! [`Conditions`] carries the definition of each clock and of the memory figures.

use std::fmt::Write as _;

use forkd_types::MiB;
use serde::Serialize;

use super::memory::Counted;
use crate::chart::Chart;
use crate::output::Findings;
use crate::report::Host;
use crate::stats::Spread;

/// The results of `fork`.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Bursts in the order of the arguments.
    pub fork: Vec<Children>,
    pub conditions: Conditions,
}

/// Results of one burst.
#[derive(Debug, Serialize)]
pub struct Children {
    /// Number of children at once.
    pub n: usize,
    /// From the request until all agents have answered.
    pub wall_ms: f64,
    /// From the request until each agent has answered.
    pub ready_ms: Spread,
    /// The first `eval` in the warm interpreter; all children are asked at once.
    pub eval_ms: Spread,
    /// The first command; all children are asked at once.
    pub exec_ms: Spread,
    /// `ready_ms` of children that start one after another.
    pub sequential_ready_ms: Spread,
    /// Memory, if the daemon's children are processes of this host.
    pub memory: Option<PerChild>,
}

/// Memory of one child.
#[derive(Debug, Serialize)]
pub struct PerChild {
    /// After the first `eval` and the first `exec`.
    #[serde(flatten)]
    pub counted: Counted,
    pub idle_60s: Counted,
}

/// Host, repetitions and definitions of a run.
#[derive(Debug, Serialize)]
pub struct Conditions {
    #[serde(flatten)]
    pub host: Host,
    pub memory_mib: u32,
    /// Definition of each clock.
    pub clock: &'static str,
    /// Definition of the memory figures.
    pub memory_counted: &'static str,
}

impl Conditions {
    /// The conditions and definitions of this program.
    pub fn new(host: Host, memory: MiB) -> Self {
        Self {
            host,
            memory_mib: memory.0,
            clock: "through the daemon's REST API; ready: from the request for the burst to the moment the \
                    child's agent has answered and has made it a machine of its own; eval, exec: from \
                    sending the request to its answer, all children asked at once",
            memory_counted: "PSS of the VMM processes from smaps_rollup; kernel: what MemAvailable lost \
                             since before the burst less their anonymous and shared memory, so it also \
                             holds shells made to refill the pool",
        }
    }
}

impl Report {
    /// The medians of each burst.
    pub fn chart(&self) -> Chart {
        let group = |burst: &Children| {
            let medians = [&burst.ready_ms, &burst.eval_ms, &burst.exec_ms];
            let name = format!("{} at once", burst.n);
            (name, medians.map(|spread| spread.p50).to_vec())
        };
        Chart {
            title: "Children of a warm Python parent, medians".to_owned(),
            unit: "ms",
            series: vec!["agent answered", "first eval", "first exec"],
            groups: self.fork.iter().map(group).collect(),
            footer: self.conditions.host.line(),
        }
    }
}

impl Findings for Report {
    fn text(&self) -> String {
        let mut text = String::new();
        let c = &self.conditions;
        let _ = writeln!(text, "{}, {} MiB guests\n", c.host.line(), c.memory_mib);
        let _ = writeln!(
            text,
            "{:>5} {:>9} {:>20} {:>20} {:>20} {:>12} {:>22}",
            "n",
            "wall ms",
            "ready p50/p99",
            "eval p50/p99",
            "exec p50/p99",
            "burst/seq",
            "KiB a child (kernel)"
        );
        for burst in &self.fork {
            let pair = |spread: &Spread| format!("{:.1}/{:.1}", spread.p50, spread.p99);
            let memory = burst.memory.as_ref().map_or("-".to_owned(), |memory| {
                let now = memory.idle_60s;
                format!("{} ({})", now.pss_kib_per_child, now.kernel_kib_per_child)
            });
            let _ = writeln!(
                text,
                "{:>5} {:>9.1} {:>20} {:>20} {:>20} {:>12.2} {:>22}",
                burst.n,
                burst.wall_ms,
                pair(&burst.ready_ms),
                pair(&burst.eval_ms),
                pair(&burst.exec_ms),
                burst.wall_ms / (burst.n as f64 * burst.sequential_ready_ms.p50),
                memory,
            );
        }
        let _ = writeln!(text, "\nclock: {}\nmemory: {}", c.clock, c.memory_counted);
        text
    }
}
