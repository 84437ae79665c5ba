//! Numbers for Prometheus.

use std::sync::{Arc, OnceLock};

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use crate::app::App;
use crate::process::usage;

static HANDLE: OnceLock<Option<PrometheusHandle>> = OnceLock::new();

/// From half a millisecond to half a minute.
const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
];

/// Begins to count. A second call does nothing.
pub fn install() {
    HANDLE.get_or_init(|| {
        let handle = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)
            .and_then(|builder| {
                builder.install_recorder().map_err(|error| {
                    tracing::warn!(%error, "metrics are not counted");
                    metrics_exporter_prometheus::BuildError::EmptyBucketsOrQuantiles
                })
            })
            .ok();
        describe();
        handle
    });
}

fn describe() {
    describe_gauge!("forkd_snapshots_total", "Snapshots in the store");
    describe_gauge!("forkd_sandboxes_active", "Sandboxes that live");
    describe_gauge!("forkd_branches_in_flight", "Branches under way");
    describe_gauge!(
        "forkd_branch_concurrency_cap",
        "Branches that may be under way at once"
    );
    describe_gauge!("forkd_build_info", "The version of the daemon");
    describe_gauge!("forkd_pool_ready", "Shells that stand ready");
    describe_gauge!("forkd_pool_depth", "Shells that should stand ready");
    describe_gauge!("forkd_vms_live", "VMM processes handed out");
    describe_gauge!(
        "forkd_store_bytes",
        Unit::Bytes,
        "Bytes the store takes on disk"
    );
    describe_gauge!(
        "forkd_store_free_bytes",
        Unit::Bytes,
        "Bytes free where the store is"
    );
    describe_histogram!(
        "forkd_ready_seconds",
        Unit::Seconds,
        "From the request to the child's agent answering"
    );
    describe_histogram!(
        "forkd_restore_seconds",
        Unit::Seconds,
        "From the request to the child's VM running"
    );
    describe_histogram!(
        "forkd_parent_ready_seconds",
        Unit::Seconds,
        "From boot to the end of the warm-up"
    );
    describe_histogram!(
        "forkd_branch_pause_seconds",
        Unit::Seconds,
        "How long a source stood still"
    );
    describe_histogram!(
        "forkd_branch_seconds",
        Unit::Seconds,
        "From the request to a durable branch"
    );
    describe_histogram!(
        "forkd_exec_seconds",
        Unit::Seconds,
        "Execs, from request to exit"
    );
    describe_histogram!(
        "forkd_eval_seconds",
        Unit::Seconds,
        "Evals, from request to result"
    );
    describe_histogram!(
        "forkd_request_seconds",
        Unit::Seconds,
        "Requests, until the answer begins"
    );
    describe_gauge!(
        "forkd_memory_own_bytes",
        Unit::Bytes,
        "Host memory that sandboxes have for themselves"
    );
    describe_gauge!(
        "forkd_memory_shared_bytes",
        Unit::Bytes,
        "Host memory that the largest sandbox shares with others"
    );
    describe_gauge!(
        "forkd_daemon_memory_bytes",
        Unit::Bytes,
        "Memory of the daemon itself"
    );
    describe_counter!(
        "forkd_errors_total",
        "Requests that were refused or failed, by code"
    );
    describe_counter!(
        "forkd_device_errors_total",
        "Devices that met input from a guest they could not use"
    );
    describe_counter!(
        "forkd_sandboxes_failed_total",
        "Sandboxes that ended by themselves"
    );
    describe_counter!("forkd_launch_failures_total", "Children that did not start");
    describe_counter!("forkd_branch_failures_total", "Branches that failed");
    describe_counter!(
        "forkd_audit_errors_total",
        "Lines the audit log could not take"
    );
}

/// What all VMs have for themselves, and what the largest of them shares with others: adding that up would count the
/// same pages many times.
async fn memory(app: &Arc<App>) -> Result<(u64, u64), crate::error::Error> {
    app.blocking(|app| {
        let mut own = 0;
        let mut shared = 0;
        for sandbox in app.sandboxes.list() {
            let used = sandbox.info().pid.map(usage).unwrap_or_default();
            own += used.own_bytes;
            shared = used.shared_bytes.max(shared);
        }
        Ok((own, shared))
    })
    .await
}

/// The text that Prometheus reads.
pub async fn render(app: &Arc<App>) -> String {
    let cap = app.config.branch_concurrency;
    gauge!("forkd_snapshots_total").set(app.store.list().len() as f64);
    gauge!("forkd_sandboxes_active").set(app.sandboxes.len() as f64);
    gauge!("forkd_branches_in_flight").set((cap - app.branch_slots.available_permits()) as f64);
    gauge!("forkd_branch_concurrency_cap").set(cap as f64);
    gauge!("forkd_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    if let Ok(status) = app.launcher.status().await {
        let ready: u32 = status.pools.iter().map(|pool| pool.ready).sum();
        let depth: u32 = status.pools.iter().map(|pool| pool.depth).sum();
        gauge!("forkd_pool_ready").set(f64::from(ready));
        gauge!("forkd_pool_depth").set(f64::from(depth));
        gauge!("forkd_vms_live").set(f64::from(status.live));
    }
    if let Ok(usage) = crate::snapshots::usage(app).await {
        gauge!("forkd_store_bytes").set(usage.physical_bytes as f64);
        gauge!("forkd_store_free_bytes").set(usage.free_bytes as f64);
    }
    if let Ok((own, shared)) = memory(app).await {
        gauge!("forkd_memory_own_bytes").set(own as f64);
        gauge!("forkd_memory_shared_bytes").set(shared as f64);
    }
    let this = usage(std::process::id());
    gauge!("forkd_daemon_memory_bytes").set((this.own_bytes + this.shared_bytes) as f64);
    HANDLE
        .get()
        .and_then(Option::as_ref)
        .map(PrometheusHandle::render)
        .unwrap_or_default()
}
