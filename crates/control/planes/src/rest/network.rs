//! Routes for the network of a sandbox: its policy, its open flows and its flow log.
//!
//! A change of the policy goes into the queue of the sandbox's owner, and is answered when it is durable and in force.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use forkd_api::{FlowEntry, FlowInfo, NetworkInfo, NetworkRequest, UpdateNetwork};
use forkd_types::Policy;
use futures::{StreamExt, stream};
use serde::Deserialize;
use utoipa::IntoParams;

use super::owned::OwnedSandbox;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::{Body, Params};
use forkd_edge::stream::{Framing, respond};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::network::{self, Log};
use forkd_sandboxes::sandbox::{Changes, NetworkChange, SandboxHandle};

/// How often a log that is followed is read.
const FOLLOW: Duration = Duration::from_millis(250);

/// The policy of a request, or the default of the daemon.
pub fn policy(app: &App, request: Option<&NetworkRequest>) -> Result<Policy, Failure> {
    match request {
        Some(request) => Ok(request.checked().map_err(Error::from)?),
        None => Ok(app.default_network()),
    }
}

/// The network policy of a sandbox, and how much it has been used.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/network", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "Policy and counters", body = NetworkInfo)
))]
pub async fn get(
    State(app): State<Arc<App>>,
    OwnedSandbox(sandbox): OwnedSandbox,
) -> Answer<Json<NetworkInfo>> {
    Ok(Json(network::info(&app, &sandbox).await))
}

/// Replaces the network policy of a sandbox. Connections that the new policy does not allow are reset before the answer.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/network", tag = "sandboxes", request_body = NetworkRequest,
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The policy is durable and in force", body = NetworkInfo)
))]
pub async fn replace(
    State(app): State<Arc<App>>,
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<NetworkRequest>,
) -> Answer<Json<NetworkInfo>> {
    let policy = request.checked().map_err(Error::from)?;
    change(&app, &sandbox, NetworkChange::Replace(policy)).await
}

/// Adds and removes rules of the network policy of a sandbox, or changes its mode.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}/network", tag = "sandboxes", request_body = UpdateNetwork,
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The policy is durable and in force", body = NetworkInfo)
))]
pub async fn edit(
    State(app): State<Arc<App>>,
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<UpdateNetwork>,
) -> Answer<Json<NetworkInfo>> {
    change(&app, &sandbox, NetworkChange::Edit(request)).await
}

async fn change(
    app: &App,
    sandbox: &SandboxHandle,
    change: NetworkChange,
) -> Answer<Json<NetworkInfo>> {
    let changes = Changes {
        network: Some(change),
        ..Changes::default()
    };
    sandbox.change(changes).await?;
    Ok(Json(network::info(app, sandbox).await))
}

/// Open TCP and UDP flows of a sandbox, at most 128.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/network/flows", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The flows", body = Vec<FlowInfo>)
))]
pub async fn flows(
    State(app): State<Arc<App>>,
    OwnedSandbox(sandbox): OwnedSandbox,
) -> Answer<Json<Vec<FlowInfo>>> {
    Ok(Json(network::flows(&app, &sandbox).await?))
}

/// Where to begin, and whether to wait for more.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct NetworkLogParams {
    /// Only entries after this number.
    #[serde(default)]
    after: u64,
    /// Wait for new entries until the client goes away.
    #[serde(default)]
    follow: bool,
}

/// Denied and ended flows of a sandbox, the oldest first: NDJSON, or server-sent events if `Accept` asks for them. The
/// log holds the last 1024 and begins anew when the sandbox is attached again.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/network/log", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id"), NetworkLogParams), responses(
    (status = 200, description = "Entries, one a line", body = String, content_type = "application/x-ndjson")
))]
pub async fn log(
    State(app): State<Arc<App>>,
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<NetworkLogParams>,
    headers: HeaderMap,
) -> Answer<Response> {
    // A refusal of the first page is an answer with a status; later ones end the stream.
    let first = network::log(&app, &sandbox, params.after).await?;
    let stop = app.stopping.clone();
    let gone = sandbox.gone.clone();
    let follow = params.follow;
    let pages = stream::unfold((Some(first), params.after), move |(page, after)| {
        let (app, sandbox) = (Arc::clone(&app), Arc::clone(&sandbox));
        async move { next_page(&app, &sandbox, page, after, follow).await }
    });
    let entries = pages.flat_map(stream::iter).take_until(async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = gone.cancelled() => {}
        }
    });
    Ok(respond(Framing::wanted(&headers), entries))
}

type Page = (Vec<FlowEntry>, (Option<Log>, u64));

/// The page in hand, or the next one. `None` at the end of a log that is not followed.
async fn next_page(
    app: &App,
    sandbox: &SandboxHandle,
    page: Option<Log>,
    after: u64,
    follow: bool,
) -> Option<Page> {
    let page = match page {
        Some(page) => page,
        None => network::log(app, sandbox, after).await.ok()?,
    };
    if let Some(last) = page.entries.last() {
        let next = last.number;
        return Some((page.entries, (None, next)));
    }
    if !follow {
        return None;
    }
    tokio::time::sleep(FOLLOW).await;
    // After a restart of the engine the log counts from 1 again.
    let after = if page.last < after { 0 } else { after };
    Some((Vec::new(), (None, after)))
}

/// Ends every connection of a sandbox.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/network/reset", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 204, description = "Every connection is reset")
))]
pub async fn reset(
    State(app): State<Arc<App>>,
    OwnedSandbox(sandbox): OwnedSandbox,
) -> Answer<StatusCode> {
    network::reset(&app, &sandbox).await?;
    Ok(StatusCode::NO_CONTENT)
}
