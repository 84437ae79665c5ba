//! Routes that report the load of guests.
//!
//! A sample is taken when a client asks, at most one in five seconds for each sandbox. A guest that no client asks about is
//! left alone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use axum::Json;
use axum::extract::{RawQuery, State};
use forkd_guest_proto as guest;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::sandbox::SandboxHandle;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};

use super::owned::{Caller, Owned};
use crate::e2b::error::{Answer, Refusal};
use crate::e2b::state::E2b;
use crate::e2b::text;

/// The shortest time between two samples, in seconds.
const INTERVAL: u64 = 5;
/// Samples that are kept for each sandbox: an hour of them.
const KEPT: usize = 720;
/// The most sandboxes of one request.
const MAX_IDS: usize = 100;

/// The load of a guest at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sample {
    pub timestamp: String,
    pub timestamp_unix: u64,
    pub cpu_count: u32,
    pub cpu_used_pct: f64,
    pub mem_used: u64,
    pub mem_total: u64,
    pub mem_cache: u64,
    pub disk_used: u64,
    pub disk_total: u64,
}

/// The samples of a sandbox.
#[derive(Debug, Default)]
pub struct Samples(Mutex<History>);

#[derive(Debug, Default)]
struct History {
    samples: VecDeque<Sample>,
    /// Busy and whole processor time at the last sample.
    cpu: (u64, u64),
}

impl Samples {
    fn history(&self) -> parking_lot::MutexGuard<'_, History> {
        self.0.lock()
    }

    pub fn add(&self, metrics: &guest::Metrics) -> Sample {
        let mut history = self.history();
        let cpu = metrics.cpu;
        let busy = cpu.user_ms + cpu.system_ms + cpu.steal_ms;
        let whole = busy + cpu.idle_ms + cpu.iowait_ms;
        let (last_busy, last_whole) = history.cpu;
        let (busy_for, whole_for) = (
            busy.saturating_sub(last_busy),
            whole.saturating_sub(last_whole),
        );
        let used = if whole_for == 0 {
            0.0
        } else {
            busy_for as f64 * 100.0 / whole_for as f64
        };
        history.cpu = (busy, whole);
        let memory = metrics.memory;
        let disk = metrics.disks.first();
        let sample = Sample {
            timestamp: text::time_ms(metrics.unix_ms),
            timestamp_unix: metrics.unix_ms / 1000,
            cpu_count: cpu.count,
            cpu_used_pct: (used * 100.0).round() / 100.0,
            mem_used: memory.total_kib.saturating_sub(memory.available_kib) << 10,
            mem_total: memory.total_kib << 10,
            mem_cache: memory.cached_kib << 10,
            disk_used: disk.map_or(0, |disk| disk.used_bytes),
            disk_total: disk.map_or(0, |disk| disk.total_bytes),
        };
        history.samples.push_back(sample.clone());
        while history.samples.len() > KEPT {
            history.samples.pop_front();
        }
        sample
    }

    fn is_due(&self, now: u64) -> bool {
        let history = self.history();
        let last = history.samples.back();
        last.is_none_or(|last| now >= last.timestamp_unix.saturating_add(INTERVAL))
    }

    fn between(&self, start: u64, end: u64) -> Vec<Sample> {
        let history = self.history();
        let fits = |sample: &&Sample| (start..=end).contains(&sample.timestamp_unix);
        history.samples.iter().filter(fits).cloned().collect()
    }
}

/// The load of a guest now.
pub async fn read(sandbox: &SandboxHandle) -> Result<guest::Metrics, Error> {
    let client = sandbox.agent().await?;
    client
        .by(agent_limits::answer())
        .metrics()
        .await
        .map_err(Error::agent("the load of the guest cannot be read"))
}

/// Takes a sample if the last is old enough.
async fn refresh(e2b: &E2b, sandbox: &SandboxHandle) -> Answer<()> {
    let state = e2b.of(&sandbox.id);
    if sandbox.phase().answers() && state.samples.is_due(forkd_sandboxes::clock::unix()) {
        let metrics = read(sandbox).await?;
        state.samples.add(&metrics);
    }
    Ok(())
}

/// Samples of one sandbox, within a range of time if one is given.
pub async fn of_one(
    State(e2b): State<Arc<E2b>>,
    owned: Owned,
    RawQuery(query): RawQuery,
) -> Answer<Json<Vec<Sample>>> {
    let query = text::query(&query.unwrap_or_default());
    let bound = |name: &str, missing: u64| match text::value(&query, name) {
        None | Some("") => Ok(missing),
        Some(text) => text
            .parse()
            .map_err(|_| Refusal::bad(format!("{name} is a time in seconds"))),
    };
    let (start, end) = (bound("start", 0)?, bound("end", u64::MAX)?);
    let Owned::Live(sandbox) = owned else {
        return Ok(Json(Vec::new()));
    };
    refresh(&e2b, &sandbox).await?;
    Ok(Json(e2b.of(&sandbox.id).samples.between(start, end)))
}

/// The newest sample of each sandbox that is named.
pub async fn of_many(
    State(e2b): State<Arc<E2b>>,
    Caller(actor): Caller,
    RawQuery(query): RawQuery,
) -> Answer<Json<Value>> {
    let query = text::query(&query.unwrap_or_default());
    let ids = text::value(&query, "sandbox_ids").unwrap_or_default();
    let ids: Vec<&str> = ids.split(',').filter(|id| !id.is_empty()).collect();
    if ids.len() > MAX_IDS {
        return Err(Refusal::bad(format!("at most {MAX_IDS} sandboxes")));
    }
    let mut found = BTreeMap::new();
    for id in ids {
        let Ok(Owned::Live(sandbox)) = Owned::find(&e2b.app, &actor, id).await else {
            continue;
        };
        refresh(&e2b, &sandbox).await?;
        if let Some(last) = e2b.of(&sandbox.id).samples.between(0, u64::MAX).pop() {
            found.insert(id.to_owned(), last);
        }
    }
    Ok(Json(json!({"sandboxes": found})))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(unix_ms: u64, busy: u64, idle: u64) -> guest::Metrics {
        let mut metrics = guest::Metrics {
            unix_ms,
            ..guest::Metrics::default()
        };
        metrics.cpu.user_ms = busy;
        metrics.cpu.idle_ms = idle;
        metrics
    }

    #[test]
    fn samples_are_kept_by_time_and_load_is_that_since_the_last() {
        let samples = Samples::default();
        assert!(samples.is_due(0));
        samples.add(&metrics(10_000, 100, 100));
        assert!(!samples.is_due(14) && samples.is_due(15));
        let second = samples.add(&metrics(15_000, 125, 175));
        assert!((second.cpu_used_pct - 25.0).abs() < 0.01);
        assert_eq!(samples.between(11, 20).len(), 1);
        assert_eq!(samples.between(0, 5), []);
        for at in 0..2000 {
            samples.add(&metrics(at * 1000, 0, 0));
        }
        assert_eq!(samples.between(0, u64::MAX).len(), KEPT);
    }
}
