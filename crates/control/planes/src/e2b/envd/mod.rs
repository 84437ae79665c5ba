//! envd: processes and files of a sandbox, on port 49983.
//!
//! Two Connect services ([`process`], [`filesystem`]) and a few plain HTTP routes ([`files`]). All of them are calls to the
//! agent in the guest.

pub mod connect;
mod files;
mod filesystem;
pub mod messages;
pub mod multipart;
pub mod paths;
mod process;
pub mod users;
pub mod watchers;

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use super::control::metrics;
use super::error::Answer;
use super::no_route;
use super::state::E2b;
use super::target::Reached;

/// The routes of envd.
pub fn router() -> Router<Arc<E2b>> {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(load))
        .route("/envs", get(environment))
        .route("/files", get(files::download).post(files::upload))
        .route("/process.Process/{method}", post(process::call))
        .route("/filesystem.Filesystem/{method}", post(filesystem::call))
        .method_not_allowed_fallback(no_route)
        .fallback(no_route)
}

/// Whether the sandbox runs.
async fn health(_reached: Reached) -> StatusCode {
    StatusCode::NO_CONTENT
}

/// The environment of all processes.
async fn environment(reached: Reached) -> Json<std::collections::BTreeMap<String, String>> {
    Json(reached.sandbox.record().environment())
}

/// The load of the guest now.
async fn load(State(_e2b): State<Arc<E2b>>, reached: Reached) -> Answer<Json<Value>> {
    let found = metrics::read(&reached.sandbox).await?;
    let sample = metrics::Samples::default().add(&found);
    Ok(Json(json!({
        "ts": sample.timestamp_unix,
        "cpu_count": sample.cpu_count,
        "cpu_used_pct": sample.cpu_used_pct,
        "mem_total": sample.mem_total,
        "mem_used": sample.mem_used,
        "mem_cache": sample.mem_cache,
        "disk_used": sample.disk_used,
        "disk_total": sample.disk_total,
    })))
}
