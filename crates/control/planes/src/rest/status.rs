//! Health, version, metrics.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use forkd_api::{API_VERSION, Health, Version};

use forkd_sandboxes::app::App;

/// Is the daemon well. Needs no token.
#[utoipa::path(get, path = "/healthz", tag = "status", responses(
    (status = 200, description = "It is well", body = Health),
    (status = 503, description = "Something does not work", body = Health)
), security(()))]
pub async fn healthz(State(app): State<Arc<App>>) -> (StatusCode, Json<Health>) {
    let problems = forkd_sandboxes::health::problems(&app).await;
    let status = if problems.is_empty() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let ok = problems.is_empty();
    (status, Json(Health { ok, problems }))
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
    forkd_sandboxes::metrics::sample(&app).await;
    let text = forkd_edge::metrics::render();
    ([("content-type", "text/plain; version=0.0.4")], text).into_response()
}
