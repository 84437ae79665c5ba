//! Routes for health, version and metrics. `/healthz` needs no token.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use forkd_api::{API_VERSION, DaemonStatus, ErrorCode, Health, Version};

use forkd_edge::auth::Actor;
use forkd_edge::errors::{Answer, Failure};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::health;

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

/// The version of the daemon.
#[utoipa::path(get, path = "/version", tag = "status", responses(
    (status = 200, description = "The version", body = Version)
))]
pub async fn version() -> Json<Version> {
    Json(Version {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api: API_VERSION.to_owned(),
    })
}

/// The walls around sandboxes and the network engine.
#[utoipa::path(get, path = "/v1/status", tag = "status", responses(
    (status = 200, description = "The walls that stand, those that do not, and the network engine", body = DaemonStatus)
))]
pub async fn status(State(app): State<Arc<App>>, actor: Actor) -> Answer<Json<DaemonStatus>> {
    let asked = app.launcher.isolation().await;
    let mut isolation = asked.map_err(|error| {
        // It is started again. The reason names paths of the host, so it goes to the log alone.
        tracing::warn!(reason = Error::from(error).chain(), "forkd-spawn does not answer");
        Failure::new(ErrorCode::Busy, "forkd-spawn does not answer")
            .with_hint("try again in a second; `forkd doctor` and the log of the daemon say why it does not start")
    })?;
    let mut network = forkd_sandboxes::ops::network::status(&app).await;
    if !actor.is_admin() {
        // Reasons name paths of the host.
        for walls in std::iter::once(&mut isolation).chain(&mut network.isolation) {
            for missing in &mut walls.missing {
                missing.reason = None;
            }
        }
    }
    let network = Some(network);
    Ok(Json(DaemonStatus { isolation, network }))
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
