//! Prepares the guest for a freeze.

use std::fs;
use std::time::Instant;

use forkd_guest_proto::{AgentError, QuiesceReport, QuiesceRequest};

use crate::agent::Agent;
use crate::files::blocking;
use crate::procfs;

/// Does what was asked, each part whether or not another failed.
pub async fn quiesce(agent: &Agent, request: &QuiesceRequest) -> Result<QuiesceReport, AgentError> {
    let start = Instant::now();
    let free_before_kib = procfs::memory().free_kib;
    let mut warnings = Vec::new();
    if request.collect {
        agent.interps.collect(&mut warnings).await;
    }
    let mut request = request.clone();
    if agent.may_change_machine().is_err() {
        (request.drop_caches, request.compact, request.trim) = (false, false, false);
    }
    let failed = blocking(move || Ok(to_disk_and_memory(&request))).await?;
    warnings.extend(failed);
    Ok(QuiesceReport {
        free_before_kib,
        free_after_kib: procfs::memory().free_kib,
        took_ms: u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
        warnings,
    })
}

fn to_disk_and_memory(request: &QuiesceRequest) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut knob = |path: &str, value: &str| {
        if let Err(error) = fs::write(path, value) {
            warnings.push(format!("cannot write {path}: {error}"));
        }
    };
    if request.sync {
        rustix::fs::sync();
    }
    if request.drop_caches {
        knob("/proc/sys/vm/drop_caches", "3");
    }
    if request.compact {
        knob("/proc/sys/vm/compact_memory", "1");
    }
    if request.trim
        && let Err(error) = crate::sys::trim("/")
    {
        warnings.push(format!("cannot trim /: {error}"));
    }
    warnings
}
