//! Health, version, metrics.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use forkd_api::{API_VERSION, Health, Version};
use futures::FutureExt;
use metrics::gauge;

use super::errors::Failure;
use crate::app::App;
use crate::auth::Actor;
use crate::error::{Error, chain};
use crate::health::{self, Problem};
use crate::process::usage;

/// Free bytes below which the store counts as full.
const LITTLE_SPACE: u64 = 64 << 20;
/// How long each part may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Is the daemon well. Needs no token.
#[utoipa::path(get, path = "/healthz", tag = "status", responses(
    (status = 200, description = "It is well", body = Health),
    (status = 503, description = "Something does not work", body = Health)
), security(()))]
pub async fn healthz(
    Extension(health): Extension<Arc<health::Health>>,
    actor: Result<Actor, Failure>,
) -> (StatusCode, Json<Health>) {
    let problems = health.problems().await;
    let status = if problems.is_empty() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    // Details name files and programs of the host.
    let detailed = actor.is_ok_and(|actor| actor.is_admin());
    let shown = problems.iter().map(|problem| {
        if detailed {
            problem.to_string()
        } else {
            problem.summary.to_owned()
        }
    });
    let body = Health {
        ok: problems.is_empty(),
        problems: shown.collect(),
    };
    (status, Json(body))
}

/// The check of the daemon's parts. It starts and changes nothing.
pub fn health(app: &Arc<App>) -> health::Health {
    let app = Arc::clone(app);
    health::Health::new(move || problems(Arc::clone(&app)).boxed())
}

async fn problems(app: Arc<App>) -> Vec<Problem> {
    let mut found = Vec::new();
    let mut add = |summary, detail| found.push(Problem { summary, detail });
    let ask = app
        .db
        .run(|c| Ok(c.query_row("SELECT 1", [], |row| row.get::<_, i64>(0))?));
    match tokio::time::timeout(PATIENCE, ask).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => add("the state database does not work", Some(chain(&error))),
        Err(_) => add("the state database does not answer", None),
    }
    match tokio::time::timeout(PATIENCE, app.launcher.peek()).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => add("forkd-spawn does not work", Some(chain(&error))),
        Err(_) => add("forkd-spawn does not answer", None),
    }
    if let Ok(fs) = rustix::fs::statvfs(app.store.layout().root())
        && fs.f_bavail.saturating_mul(fs.f_frsize) < LITTLE_SPACE
    {
        add("the store's file system is full", None);
    }
    found
}

/// Which version.
#[utoipa::path(get, path = "/version", tag = "status", responses(
    (status = 200, description = "The version", body = Version)
))]
pub async fn version() -> Json<Version> {
    Json(Version {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api: API_VERSION.to_owned(),
    })
}

/// Metrics in Prometheus' text format.
#[utoipa::path(get, path = "/metrics", tag = "status", responses(
    (status = 200, description = "The metrics", body = String, content_type = "text/plain")
))]
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    set_gauges(&app).await;
    let text = crate::metrics::render();
    ([("content-type", "text/plain; version=0.0.4")], text).into_response()
}

/// Sets every gauge to the current value.
async fn set_gauges(app: &Arc<App>) {
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
}

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
