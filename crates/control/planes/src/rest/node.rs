//! Routes of the daemon as one host of a fleet.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use forkd_api::{LOAD_HEADER, NodeInfo, UpdateNode};

use forkd_edge::errors::Answer;
use forkd_edge::extract::Body;
use forkd_sandboxes::app::App;
use forkd_sandboxes::node::{self, LoadMeter};

/// The name, room and load of this host.
#[utoipa::path(get, path = "/v1/node", tag = "status", responses(
    (status = 200, description = "This host", body = NodeInfo)
))]
pub async fn node(State(app): State<Arc<App>>) -> Json<NodeInfo> {
    Json(node::info(&app))
}

/// Drains this host, or ends a drain. While it drains it takes no new sandboxes; those that run go on.
#[utoipa::path(patch, path = "/v1/node", tag = "status", request_body = UpdateNode, responses(
    (status = 200, description = "This host", body = NodeInfo)
))]
pub async fn update(
    State(app): State<Arc<App>>,
    Body(request): Body<UpdateNode>,
) -> Answer<Json<NodeInfo>> {
    if let Some(draining) = request.draining {
        app.limits.set_draining(draining);
        tracing::info!(draining, "told whether to take new sandboxes");
    }
    Ok(Json(node::info(&app)))
}

/// Puts the load of the host on a response.
pub async fn with_load(
    State((app, meter)): State<(Arc<App>, Arc<LoadMeter>)>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = next.run(request).await;
    let load = HeaderValue::from(meter.load(&app));
    let name = HeaderName::from_static(LOAD_HEADER);
    response.headers_mut().insert(name, load);
    response
}
