//! The control API: sandboxes, snapshots, templates.

mod lifecycle;
mod listing;
pub mod metrics;
mod network;
mod owned;
mod sandboxes;
mod snapshots;
mod templates;
mod wire;

use std::sync::Arc;

use axum::Router;
use axum::extract::{FromRequest, Request};
use axum::routing::{delete, get, post, put};
use forkd_edge::extract::Body;
use serde::de::DeserializeOwned;

use super::error::Refusal;
use super::no_route;
use super::state::E2b;

/// Every route of the control API, with the method it takes.
pub const ROUTES: &[(&str, &str)] = &[
    ("GET", "/sandboxes"),
    ("POST", "/sandboxes"),
    ("GET", "/v2/sandboxes"),
    ("POST", "/v2/sandboxes"),
    ("GET", "/sandboxes/metrics"),
    ("GET", "/sandboxes/{id}"),
    ("DELETE", "/sandboxes/{id}"),
    ("POST", "/sandboxes/{id}/timeout"),
    ("POST", "/sandboxes/{id}/refreshes"),
    ("POST", "/sandboxes/{id}/pause"),
    ("POST", "/sandboxes/{id}/resume"),
    ("POST", "/sandboxes/{id}/connect"),
    ("POST", "/v2/sandboxes/{id}/connect"),
    ("GET", "/sandboxes/{id}/metrics"),
    ("GET", "/sandboxes/{id}/logs"),
    ("GET", "/v2/sandboxes/{id}/logs"),
    ("POST", "/sandboxes/{id}/snapshots"),
    ("POST", "/sandboxes/{id}/fork"),
    ("PUT", "/sandboxes/{id}/network"),
    ("GET", "/snapshots"),
    ("GET", "/templates"),
    ("GET", "/v2/templates"),
    ("GET", "/templates/aliases/{alias}"),
    ("GET", "/templates/{id}"),
    ("DELETE", "/templates/{id}"),
];

/// The routes. A table in the tests names each with what another owner finds.
pub fn router() -> Router<Arc<E2b>> {
    Router::new()
        .route(
            "/sandboxes",
            get(listing::list_running).post(sandboxes::create_v1),
        )
        .route("/v2/sandboxes", get(listing::list).post(sandboxes::create))
        .route("/sandboxes/metrics", get(metrics::of_many))
        .route(
            "/sandboxes/{id}",
            get(sandboxes::get).delete(lifecycle::kill),
        )
        .route("/sandboxes/{id}/timeout", post(lifecycle::timeout))
        .route("/sandboxes/{id}/refreshes", post(lifecycle::refresh))
        .route("/sandboxes/{id}/pause", post(lifecycle::pause))
        .route("/sandboxes/{id}/resume", post(lifecycle::resume))
        .route("/sandboxes/{id}/connect", post(lifecycle::connect))
        .route("/v2/sandboxes/{id}/connect", post(lifecycle::connect))
        .route("/sandboxes/{id}/metrics", get(metrics::of_one))
        .route("/sandboxes/{id}/logs", get(sandboxes::logs))
        .route("/v2/sandboxes/{id}/logs", get(sandboxes::logs_v2))
        .route("/sandboxes/{id}/snapshots", post(snapshots::create))
        .route("/sandboxes/{id}/fork", post(sandboxes::fork))
        .route("/sandboxes/{id}/network", put(network::update))
        .route("/snapshots", get(snapshots::list))
        .route("/templates", get(templates::list))
        .route("/v2/templates", get(templates::list))
        .route("/templates/aliases/{alias}", get(templates::alias))
        .route(
            "/templates/{id}",
            delete(snapshots::delete).get(templates::get),
        )
        .method_not_allowed_fallback(no_route)
        .fallback(no_route)
}

/// A JSON body; an empty one is `{}`.
#[derive(Debug)]
pub struct Sent<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Sent<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Self, Refusal> {
        let Body(value) = Body::<T>::from_request(request, state).await?;
        Ok(Self(value))
    }
}
