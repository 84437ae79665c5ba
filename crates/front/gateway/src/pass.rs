//! Sends a request on to a node, and its answer back. Bodies are streamed, and an upgrade (WebSocket) is passed on.

use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use forkd_api::ErrorCode;
use forkd_edge::errors::{Answer, Failure};
use forkd_rest_client::Client;
use forkd_types::NodeName;
use futures::TryStreamExt;
use hyper::upgrade::{self, OnUpgrade};
use hyper_util::rt::TokioIo;

use crate::nodes::Nodes;

/// Headers that belong to one connection. `Origin` was checked here, and the node has another host name.
const NOT_PASSED: &[&str] = &[
    "connection",
    "host",
    "keep-alive",
    "origin",
    "proxy-authenticate",
    "proxy-authorization",
    "sec-fetch-site",
    "te",
    "trailer",
    "transfer-encoding",
];

/// Sends a request on with its own path.
pub async fn to(nodes: &Nodes, node: &NodeName, request: Request) -> Answer<Response> {
    let path = request.uri().path().to_owned();
    to_path(nodes, node, &path, request).await
}

/// Sends a request on with another path and its own query.
pub async fn to_path(
    nodes: &Nodes,
    node: &NodeName,
    path: &str,
    mut request: Request,
) -> Answer<Response> {
    let client = nodes.client(node)?;
    let wants = request.headers().contains_key(header::UPGRADE);
    let ours = wants.then(|| upgrade::on(&mut request));
    let (parts, body) = request.into_parts();
    let mut passed = client.pass_on(parts.method, &with_query(path, parts.uri.query()), wants);
    passed = passed.headers(passed_headers(&parts.headers));
    if wants {
        passed = passed.header(header::CONNECTION, "Upgrade");
    } else {
        passed = passed.body(reqwest::Body::wrap_stream(body.into_data_stream()));
    }
    answer_of(nodes, node, passed, ours).await
}

/// Sends a request with a body that is known.
pub async fn with_body(
    nodes: &Nodes,
    node: &NodeName,
    parts: &axum::http::request::Parts,
    body: bytes::Bytes,
) -> Answer<Response> {
    let client: Client = nodes.client(node)?;
    let path = with_query(parts.uri.path(), parts.uri.query());
    let mut headers = passed_headers(&parts.headers);
    headers.remove(header::CONTENT_LENGTH);
    let passed = client.pass_on(parts.method.clone(), &path, false);
    answer_of(nodes, node, passed.headers(headers).body(body), None).await
}

async fn answer_of(
    nodes: &Nodes,
    node: &NodeName,
    request: reqwest::RequestBuilder,
    ours: Option<OnUpgrade>,
) -> Answer<Response> {
    let answer = request.send().await.map_err(|error| {
        if error.is_connect() {
            nodes.mark_lost(node, "no connection");
        }
        unanswered(node)
    })?;
    let status = answer.status();
    let headers = answer.headers().clone();
    let mut response = Response::builder().status(status);
    if let Some(own) = response.headers_mut() {
        *own = headers;
        if status != StatusCode::SWITCHING_PROTOCOLS {
            for name in NOT_PASSED {
                own.remove(*name);
            }
        }
    }
    let body = match ours {
        Some(ours) if status == StatusCode::SWITCHING_PROTOCOLS => {
            tokio::spawn(join(ours, answer));
            Body::empty()
        }
        _ => Body::from_stream(answer.bytes_stream().map_err(std::io::Error::other)),
    };
    response.body(body).map_err(|_| unanswered(node))
}

/// Copies bytes between the two sides of an upgraded connection until one ends.
async fn join(ours: OnUpgrade, answer: reqwest::Response) {
    if let (Ok(ours), Ok(mut theirs)) = tokio::join!(ours, answer.upgrade()) {
        let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(ours), &mut theirs).await;
    }
}

fn with_query(path: &str, query: Option<&str>) -> String {
    match query {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    }
}

fn passed_headers(headers: &HeaderMap) -> HeaderMap {
    let mut passed = headers.clone();
    for name in NOT_PASSED {
        passed.remove(*name);
    }
    passed
}

fn unanswered(node: &NodeName) -> Failure {
    Failure::new(
        ErrorCode::NodeLost,
        format!("the connection to the node {node} broke"),
    )
    .with_hint(
        "GET /v1/nodes says which nodes answer; a request with an Idempotency-Key can be repeated",
    )
}
