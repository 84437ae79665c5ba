//! Gauges of the domain, for Prometheus.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use forkd_vmm_proto::COUNTERS;
use futures::future::join_all;
use metrics::{counter, gauge};

use crate::app::App;
use crate::error::Error;
use crate::ops::snapshots;
use crate::process::usage;
use crate::sandbox::Ask;

/// Bytes that all VMs hold alone, and bytes that the largest VM shares. The sum of all shared bytes would count the same
/// pages once per child.
async fn memory(app: &Arc<App>) -> Result<(u64, u64), Error> {
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

/// How long a scrape waits for the counters of all VMMs together, and for those of the network engine.
const PATIENCE: Duration = Duration::from_millis(500);

/// Sums of the device counters over the VMs that answer in time. A VM that ends takes its counts along, so the sums are
/// gauges. Names come from a closed list, however hostile a VMM is, and every name of the list has a sum: a gauge that is
/// not set keeps the counts of VMs that have ended.
async fn devices(app: &App) -> BTreeMap<(&'static str, &'static str), u64> {
    let asked = app.sandboxes.list().into_iter().map(|sandbox| async move {
        let counters = sandbox.answer(Ask::Counters);
        tokio::time::timeout(PATIENCE, counters).await.ok()?.ok()
    });
    let mut sums = nothing();
    for counters in join_all(asked).await.into_iter().flatten() {
        for known in counters.known() {
            let sum: &mut u64 = sums.entry((known.device, known.info.name)).or_default();
            *sum = sum.saturating_add(known.value);
        }
    }
    sums
}

/// Every counter of every device at zero.
fn nothing() -> BTreeMap<(&'static str, &'static str), u64> {
    let names = COUNTERS
        .iter()
        .flat_map(|info| info.devices.iter().map(|device| (*device, info.name)));
    names.map(|name| (name, 0)).collect()
}

/// Counters of the network engine. A host without the engine has none.
async fn network(app: &Arc<App>) {
    if !app.net.is_installed() {
        return;
    }
    let asked = Arc::clone(app);
    // A task of its own: a scrape does not wait for the deadline of the engine, after which the engine is replaced.
    let totals = tokio::spawn(async move { asked.net.totals().await });
    let Ok(Ok(Ok((counters, sandboxes)))) = tokio::time::timeout(PATIENCE, totals).await else {
        return;
    };
    gauge!("forkd_net_sandboxes").set(f64::from(sandboxes));
    for (direction, bytes) in [("up", counters.bytes_up), ("down", counters.bytes_down)] {
        counter!("forkd_net_bytes_total", "direction" => direction).absolute(bytes);
    }
    counter!("forkd_net_flows_total").absolute(counters.flows);
    counter!("forkd_net_denied_total").absolute(counters.denied);
    counter!("forkd_net_dns_total").absolute(counters.dns);
    counter!("forkd_net_dns_denied_total").absolute(counters.dns_denied);
    counter!("forkd_net_resets_total").absolute(counters.resets);
    counter!("forkd_net_limited_total").absolute(counters.limited);
}

/// Sets the gauges that are read at each scrape, not at each change.
pub async fn sample(app: &Arc<App>) {
    let cap = app.config.branch_concurrency;
    gauge!("forkd_snapshots_total").set(app.store.list().len() as f64);
    gauge!("forkd_sandboxes_active").set(app.sandboxes.len() as f64);
    gauge!("forkd_branches_in_flight").set(app.limits.cuts_under_way() as f64);
    gauge!("forkd_branch_concurrency_cap").set(cap as f64);
    gauge!("forkd_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    // Without `forkd-spawn` there is no VM.
    let status = app.launcher.status().await.unwrap_or_default();
    let ready: u32 = status.pools.iter().map(|pool| pool.ready).sum();
    let depth: u32 = status.pools.iter().map(|pool| pool.depth).sum();
    gauge!("forkd_pool_ready").set(f64::from(ready));
    gauge!("forkd_pool_depth").set(f64::from(depth));
    gauge!("forkd_vms_live").set(f64::from(status.live));
    if let Ok(usage) = snapshots::usage(app).await {
        gauge!("forkd_store_bytes").set(usage.physical_bytes as f64);
        gauge!("forkd_store_free_bytes").set(usage.free_bytes as f64);
    }
    if let Ok((own, shared)) = memory(app).await {
        gauge!("forkd_memory_own_bytes").set(own as f64);
        gauge!("forkd_memory_shared_bytes").set(shared as f64);
    }
    network(app).await;
    for ((device, counter), sum) in devices(app).await {
        gauge!("forkd_vmm_device", "device" => device, "counter" => counter).set(sum as f64);
    }
    let this = usage(std::process::id());
    gauge!("forkd_daemon_memory_bytes").set((this.own_bytes + this.shared_bytes) as f64);
}
