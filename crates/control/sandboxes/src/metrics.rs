//! Gauges of the domain, for Prometheus.

use std::sync::Arc;

use metrics::gauge;

use crate::app::App;
use crate::error::Error;
use crate::ops::snapshots;
use crate::process::usage;

/// What all VMs have for themselves, and what the largest of them shares with others: adding that up would count the
/// same pages many times.
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

/// Sets the gauges that are read when somebody scrapes, not when something changes.
pub async fn sample(app: &Arc<App>) {
    let cap = app.config.branch_concurrency;
    gauge!("forkd_snapshots_total").set(app.store.list().len() as f64);
    gauge!("forkd_sandboxes_active").set(app.sandboxes.len() as f64);
    gauge!("forkd_branches_in_flight").set(app.limits.cuts_under_way() as f64);
    gauge!("forkd_branch_concurrency_cap").set(cap as f64);
    gauge!("forkd_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    if let Ok(status) = app.launcher.status().await {
        let ready: u32 = status.pools.iter().map(|pool| pool.ready).sum();
        let depth: u32 = status.pools.iter().map(|pool| pool.depth).sum();
        gauge!("forkd_pool_ready").set(f64::from(ready));
        gauge!("forkd_pool_depth").set(f64::from(depth));
        gauge!("forkd_vms_live").set(f64::from(status.live));
    }
    if let Ok(usage) = snapshots::usage(app).await {
        gauge!("forkd_store_bytes").set(usage.physical_bytes as f64);
        gauge!("forkd_store_free_bytes").set(usage.free_bytes as f64);
    }
    if let Ok((own, shared)) = memory(app).await {
        gauge!("forkd_memory_own_bytes").set(own as f64);
        gauge!("forkd_memory_shared_bytes").set(shared as f64);
    }
    let this = usage(std::process::id());
    gauge!("forkd_daemon_memory_bytes").set((this.own_bytes + this.shared_bytes) as f64);
}
