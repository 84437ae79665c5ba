//! The route `/mcp`: the tools of `forkd-mcp`, which call the REST routes of this daemon in process.
//!
//! Every call of a tool is a request with the token and the peer of the request that carried it. It passes the gate like
//! any other, so roles, owners, limits and the audit log hold for tools, too.

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use forkd_api::routes;
use forkd_edge::errors::Answer;
use forkd_edge::extract;
use forkd_edge::listen::Peer;
use forkd_mcp::http::Service;
use forkd_mcp::{Options, Selection};
use forkd_rest_client::{Client, Inside};
use http_body_util::Full;
use tokio_util::sync::CancellationToken;

use crate::inside::inside;

/// The largest message, in bytes: a file of 1 MiB in base64, and room for the rest.
const MAX_MESSAGE: usize = 4 << 20;

/// The route, without a gate. `rest` is guarded.
pub fn router(
    rest: Router,
    tools: Selection,
    stopping: CancellationToken,
) -> anyhow::Result<Router> {
    // No request leaves the process: the address only has to pass the check of Host.
    let client = Client::new(&"http://localhost".parse()?, None)?;
    let options = Options {
        tools,
        ..Options::default()
    };
    let service = forkd_mcp::http::service(
        move |parts| client.inside(as_sender_of(parts, rest.clone())),
        options,
        stopping,
    );
    Ok(Router::new()
        .route(routes::MCP, any(answer))
        .with_state(service))
}

async fn answer(State(service): State<Service>, request: Request) -> Answer<Response> {
    let (parts, body) = request.into_parts();
    // Here and not in the service, which waits for a slow body as long as it takes.
    let body = extract::whole(body, MAX_MESSAGE).await?;
    let request = Request::from_parts(parts, Full::new(body));
    Ok(service.handle(request).await.into_response())
}

/// The REST routes, for the client that sent a request.
fn as_sender_of(parts: &Parts, rest: Router) -> Inside {
    let token = parts.headers.get(AUTHORIZATION).cloned();
    let peer = parts.extensions.get::<Peer>().cloned();
    inside(rest, move |request| {
        if let Some(token) = &token {
            request.headers_mut().insert(AUTHORIZATION, token.clone());
        }
        if let Some(peer) = &peer {
            request.extensions_mut().insert(peer.clone());
        }
    })
}
