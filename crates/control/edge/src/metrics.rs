//! Metrics in the format of Prometheus: the recorder, the names, the text.
//!
//! Invariant: every label value comes from a closed set. The recorder keeps a series for each set of labels for as long
//! as the daemon runs, so a label that a client chooses would be memory that a client fills. Histograms keep raw samples
//! until [`run_upkeep`] folds them into buckets; [`keep_drained`] does so every few seconds, scraped or not.

use std::sync::OnceLock;
use std::time::Duration;

use axum::http::Method;
use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;

static HANDLE: OnceLock<Option<PrometheusHandle>> = OnceLock::new();

/// How often raw samples of histograms are folded into buckets.
const UPKEEP: Duration = Duration::from_secs(5);
/// Upper bounds of the buckets of every histogram of seconds: half a millisecond to half a minute.
const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
];

/// Installs the recorder. A second call does nothing.
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
    describe_gauge!(
        "forkd_vmm_device",
        "Device counters of live VMs, summed by device and counter"
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
    describe_network();
    describe_counter!(
        "forkd_metrics_folds_total",
        "Times that raw samples of histograms were folded into buckets"
    );
    describe_counter!(
        "forkd_audit_errors_total",
        "Lines the audit log could not take"
    );
}

/// Names of the metrics of the network engine.
fn describe_network() {
    describe_gauge!(
        "forkd_net_sandboxes",
        "Sandboxes that the network engine serves"
    );
    describe_counter!(
        "forkd_net_bytes_total",
        Unit::Bytes,
        "Bytes of payload between guests and the network, by direction"
    );
    describe_counter!(
        "forkd_net_flows_total",
        "TCP and UDP flows that were allowed"
    );
    describe_counter!(
        "forkd_net_denied_total",
        "TCP and UDP flows that a policy or a limit denied"
    );
    describe_counter!("forkd_net_dns_total", "DNS questions of guests");
    describe_counter!(
        "forkd_net_dns_denied_total",
        "DNS questions that a policy or a limit denied"
    );
    describe_counter!(
        "forkd_net_resets_total",
        "Segments of unknown connections that were answered with a reset"
    );
    describe_counter!(
        "forkd_net_limited_total",
        "Waits of connections and lost datagrams because of a limit on the rate"
    );
    describe_counter!(
        "forkd_net_engine_restarts_total",
        "Ends of the network engine"
    );
}

/// Counts a request. The method is a label, so methods outside the known set share one value.
pub fn request_served(method: &Method, latency: Duration) {
    metrics::histogram!("forkd_request_seconds", "method" => crate::telemetry::method_label(method))
        .record(latency.as_secs_f64());
}

fn handle() -> Option<&'static PrometheusHandle> {
    HANDLE.get().and_then(Option::as_ref)
}

/// Folds the raw samples of histograms into their buckets.
pub fn run_upkeep() {
    if let Some(handle) = handle() {
        handle.run_upkeep();
    }
}

/// Runs the upkeep until the daemon stops.
pub async fn keep_drained(stop: CancellationToken) {
    let mut ticks = tokio::time::interval(UPKEEP);
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                run_upkeep();
                metrics::counter!("forkd_metrics_folds_total").increment(1);
            }
            () = stop.cancelled() => return,
        }
    }
}

/// The text that Prometheus reads. The caller sets the gauges first.
pub fn render() -> String {
    handle().map(PrometheusHandle::render).unwrap_or_default()
}
