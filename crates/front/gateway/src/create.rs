//! New sandboxes, snapshots and workspaces: which node makes them.

use axum::Json;
use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use forkd_api::{ErrorBody, ErrorCode};
use forkd_edge::errors::{Answer, Failure};
use forkd_fleet::placement::{self, Share};
use forkd_types::{NodeName, SandboxId};
use futures::future::join_all;
use serde_json::Value;

use crate::nodes::Nodes;
use crate::{own, pass};

/// The largest body of a request that is placed.
const MAX_BODY: usize = 1 << 20;
/// The largest answer of a node that is joined with others.
pub const MAX_ANSWER: usize = 64 << 20;
/// Nodes that are asked for one share before the client is refused.
const MAX_NODES: usize = 4;
/// The header with which a client marks a request that it may repeat.
const KEY: &str = "idempotency-key";

/// Starts children, split over the nodes that have the snapshot. All start, or none.
pub async fn sandboxes(nodes: &Nodes, request: Request) -> Answer<Response> {
    let (parts, body) = read(request).await?;
    let text = |name: &str| body.get(name).and_then(Value::as_str).map(str::to_owned);
    let Some(tag) = text("snapshot_tag") else {
        // The node says what is wrong with it.
        return pass::with_body(nodes, &own::any(nodes)?, &parts, encode(&body)).await;
    };
    let holders = own::holders(nodes, &tag).await?;
    if has_volumes(&body) {
        return on_node_of_volumes(nodes, &holders, &parts, &encode(&body)).await;
    }
    let count = body.get("n").and_then(Value::as_u64).unwrap_or(1);
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    if let Some(key) = key(&parts) {
        let ranked = placement::by_key(&holders, &key);
        return first_that_takes(nodes, &ranked, &parts, &encode(&body)).await;
    }
    let shares = if count <= forkd_api::MAX_CHILDREN {
        placement::split(&nodes.view(), &tag, count)
    } else {
        Vec::new()
    };
    match shares.as_slice() {
        // Refused by a node, with its reason.
        [] => pass::with_body(nodes, &holders[0], &parts, encode(&body)).await,
        [_] => {
            let ranked = ranked(nodes, &tag, &shares[0].node);
            first_that_takes(nodes, &ranked, &parts, &encode(&body)).await
        }
        _ => burst(nodes, &tag, &shares, &parts, &body).await,
    }
}

/// Builds a snapshot on the node that has the tag already, and will say so, or on the least loaded one.
pub async fn snapshot(nodes: &Nodes, request: Request) -> Answer<Response> {
    let (parts, body) = read(request).await?;
    let view = nodes.view();
    let tag = body.get("tag").and_then(Value::as_str).unwrap_or_default();
    let holder = view.holders(tag).next().map(|(name, _)| name.clone());
    let ranked = match (holder, key(&parts)) {
        (Some(holder), _) => vec![holder],
        (None, Some(key)) => placement::by_key(view.nodes.keys(), &key),
        (None, None) => placement::by_load(&view.nodes),
    };
    if ranked.is_empty() {
        own::any(nodes)?;
    }
    first_that_takes(nodes, &ranked, &parts, &encode(&body)).await
}

/// Makes a workspace on a node that has its snapshot. A name that exists is refused by the node that has it.
pub async fn workspace(nodes: &Nodes, request: Request) -> Answer<Response> {
    let (parts, body) = read(request).await?;
    let text = |name: &str| {
        body.get(name)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    nodes.look().await;
    let view = nodes.view();
    let ranked = match view.host_of_workspace(&text("name")) {
        Some(node) => vec![node.clone()],
        None => {
            let holders = own::holders(nodes, &text("snapshot_tag")).await?;
            placement::by_load(view.nodes.iter().filter(|(name, _)| holders.contains(name)))
        }
    };
    first_that_takes(nodes, &ranked, &parts, &encode(&body)).await
}

/// The chosen node first, then the other holders by load.
fn ranked(nodes: &Nodes, tag: &str, first: &NodeName) -> Vec<NodeName> {
    let others = placement::by_load(nodes.view().holders(tag));
    let mut all = vec![first.clone()];
    all.extend(others.into_iter().filter(|name| name != first));
    all
}

/// Asks one node after the other until one does not refuse for lack of room.
async fn first_that_takes(
    nodes: &Nodes,
    ranked: &[NodeName],
    parts: &Parts,
    body: &Bytes,
) -> Answer<Response> {
    let mut last = None;
    for node in ranked.iter().take(MAX_NODES) {
        let answer = pass::with_body(nodes, node, parts, body.clone()).await;
        match refused_for_room(answer).await {
            Outcome::Done(answer) => return answer,
            Outcome::NoRoom(answer) => last = Some(answer),
        }
    }
    last.unwrap_or_else(|| own::any(nodes).map(|_| StatusCode::SERVICE_UNAVAILABLE.into_response()))
}

fn has_volumes(body: &Value) -> bool {
    let volumes = body.get("volumes").and_then(Value::as_array);
    volumes.is_some_and(|volumes| !volumes.is_empty())
}

/// Starts children with volumes, which belong to one node: the first holder of the snapshot that knows the volumes.
async fn on_node_of_volumes(
    nodes: &Nodes,
    holders: &[NodeName],
    parts: &Parts,
    body: &Bytes,
) -> Answer<Response> {
    let mut last = None;
    for node in holders {
        let answer = pass::with_body(nodes, node, parts, body.clone()).await?;
        if answer.status() != StatusCode::NOT_FOUND {
            return Ok(answer);
        }
        let (code, answer) = code_of(answer).await;
        if code != Some(ErrorCode::VolumeNotFound) {
            return Ok(answer);
        }
        last = Some(answer);
    }
    match last {
        Some(answer) => Ok(answer),
        None => own::any(nodes).map(|_| StatusCode::SERVICE_UNAVAILABLE.into_response()),
    }
}

/// The code in the body of a refusal, and the refusal.
async fn code_of(answer: Response) -> (Option<ErrorCode>, Response) {
    let (parts, body) = answer.into_parts();
    let Ok(body) = to_bytes(body, MAX_BODY).await else {
        return (None, parts.status.into_response());
    };
    let code = serde_json::from_slice::<ErrorBody>(&body).map(|body| body.code);
    (code.ok(), Response::from_parts(parts, body.into()))
}

enum Outcome {
    Done(Answer<Response>),
    /// The next node may take it.
    NoRoom(Answer<Response>),
}

/// Whether another node may succeed. A connection that broke may have done the work, so it is not tried elsewhere.
async fn refused_for_room(answer: Answer<Response>) -> Outcome {
    let answer = match answer {
        Ok(answer) if answer.status() == StatusCode::SERVICE_UNAVAILABLE => answer,
        other => return Outcome::Done(other),
    };
    let (code, answer) = code_of(answer).await;
    match code {
        Some(ErrorCode::LimitReached | ErrorCode::ShuttingDown) => Outcome::NoRoom(Ok(answer)),
        _ => Outcome::Done(Ok(answer)),
    }
}

/// Starts the shares of a burst side by side and joins the answers.
async fn burst(
    nodes: &Nodes,
    tag: &str,
    shares: &[Share],
    parts: &Parts,
    body: &Value,
) -> Answer<Response> {
    let starting = shares
        .iter()
        .map(|share| start_share(nodes, tag, share, parts, body.clone()));
    let started = join_all(starting).await;
    let mut status = StatusCode::CREATED;
    let mut all = Vec::new();
    let mut failure = None;
    for outcome in started {
        match outcome {
            Ok((code, Ok(children))) => {
                status = code;
                all.extend(children);
            }
            Ok((_, Err(answer))) => failure = Some(Ok(answer)),
            Err(error) => failure = Some(Err(error)),
        }
    }
    match failure {
        None => Ok((status, Json(all)).into_response()),
        Some(failure) => {
            end(nodes, &all, parts).await;
            failure
        }
    }
}

/// Starts one share. The children, or the answer of the node that refused.
async fn start_share(
    nodes: &Nodes,
    tag: &str,
    share: &Share,
    parts: &Parts,
    mut body: Value,
) -> Answer<(StatusCode, Result<Vec<Value>, Response>)> {
    body["n"] = share.count.into();
    let ranked = ranked(nodes, tag, &share.node);
    let answer = first_that_takes(nodes, &ranked, parts, &encode(&body)).await?;
    Ok((answer.status(), children(answer).await))
}

/// The children in an answer, or the answer if it is a refusal.
async fn children(answer: Response) -> Result<Vec<Value>, Response> {
    let (parts, body) = answer.into_parts();
    let Ok(bytes) = to_bytes(body, MAX_ANSWER).await else {
        return Err(StatusCode::BAD_GATEWAY.into_response());
    };
    if parts.status.is_success()
        && let Ok(Value::Array(found)) = serde_json::from_slice(&bytes)
    {
        return Ok(found);
    }
    Err(Response::from_parts(parts, bytes.into()))
}

/// Deletes the children of a burst that did not start as a whole.
async fn end(nodes: &Nodes, children: &[Value], parts: &Parts) {
    let ids = children
        .iter()
        .filter_map(|child| child.get("id")?.as_str());
    join_all(ids.map(|id| end_one(nodes, id, parts))).await;
}

async fn end_one(nodes: &Nodes, id: &str, parts: &Parts) {
    let node = id.parse::<SandboxId>().ok().and_then(|id| id.node());
    let path = forkd_api::routes::fill(forkd_api::routes::SANDBOX, &[id]);
    let mut request = Request::new(axum::body::Body::empty());
    *request.method_mut() = Method::DELETE;
    if let Some(token) = parts.headers.get(header::AUTHORIZATION) {
        let headers = request.headers_mut();
        headers.insert(header::AUTHORIZATION, token.clone());
    }
    if let Some(node) = node
        && let Err(error) = pass::to_path(nodes, &node, &path, request).await
    {
        let error = error.into_body().error;
        tracing::warn!(id, error, "a child of a refused burst stays");
    }
}

async fn read(request: Request) -> Answer<(Parts, Value)> {
    let (parts, body) = request.into_parts();
    let bytes = to_bytes(body, MAX_BODY).await.map_err(|_| {
        Failure::new(
            ErrorCode::TooLarge,
            format!("the body is larger than {MAX_BODY} bytes"),
        )
    })?;
    let body: Value = serde_json::from_slice(&bytes).map_err(|error| {
        Failure::new(
            ErrorCode::InvalidRequest,
            format!("the body is not JSON: {error}"),
        )
    })?;
    if !body.is_object() {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            "the body is not a JSON object",
        ));
    }
    Ok((parts, body))
}

fn encode(body: &Value) -> Bytes {
    body.to_string().into()
}

fn key(parts: &Parts) -> Option<String> {
    let key = parts.headers.get(KEY)?.to_str().ok()?;
    Some(key.to_owned())
}
