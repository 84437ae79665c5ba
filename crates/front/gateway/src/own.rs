//! Answers of the gateway itself, and the choice of a node for a name.

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkd_api::{API_VERSION, ErrorCode, Health, Version};
use forkd_edge::errors::{Answer, Failure};
use forkd_fleet::placement;
use forkd_types::{NodeName, SandboxId};

use crate::nodes::Nodes;
use crate::pass;

/// Well, if a node answers.
pub fn health(nodes: &Nodes) -> Response {
    let reachable = !nodes.view().nodes.is_empty();
    let (status, problems) = if reachable {
        (StatusCode::OK, Vec::new())
    } else {
        let problem = "no node of the fleet answers".to_owned();
        (StatusCode::SERVICE_UNAVAILABLE, vec![problem])
    };
    (
        status,
        Json(Health {
            ok: reachable,
            problems,
        }),
    )
        .into_response()
}

/// The version of the gateway.
pub fn version() -> Response {
    Json(Version {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        api: API_VERSION.to_owned(),
    })
    .into_response()
}

/// Nodes and their load, in Prometheus' text format.
pub fn metrics(nodes: &Nodes) -> Response {
    use std::fmt::Write as _;
    let all = nodes.status();
    let reachable = all.iter().filter(|node| node.reachable).count();
    let mut text = format!(
        "# TYPE forkd_gateway_nodes gauge\nforkd_gateway_nodes{{state=\"reachable\"}} {reachable}\n\
         forkd_gateway_nodes{{state=\"lost\"}} {}\n# TYPE forkd_gateway_node_load gauge\n",
        all.len() - reachable
    );
    for (name, node) in &nodes.view().nodes {
        let _ = writeln!(
            text,
            "forkd_gateway_node_load{{node=\"{name}\"}} {}",
            node.load
        );
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// Every node, for clients that a node lets in.
pub async fn nodes(nodes: &Nodes, headers: &HeaderMap) -> Answer<Response> {
    // The gateway has no tokens of its own: a client that may ask a node about itself may ask for the list.
    let node = any(nodes)?;
    let mut probe = Request::new(axum::body::Body::empty());
    if let Some(token) = headers.get(header::AUTHORIZATION) {
        probe
            .headers_mut()
            .insert(header::AUTHORIZATION, token.clone());
    }
    let answer = pass::to_path(nodes, &node, forkd_api::routes::NODE, probe).await?;
    if !answer.status().is_success() {
        return Ok(answer);
    }
    Ok(Json(nodes.status()).into_response())
}

/// The least loaded node.
pub fn any(nodes: &Nodes) -> Answer<NodeName> {
    let view = nodes.view();
    let by_load = placement::by_load(&view.nodes);
    by_load
        .into_iter()
        .next()
        // One that drains still answers.
        .or_else(|| view.nodes.keys().next().cloned())
        .ok_or_else(|| {
            Failure::new(ErrorCode::NodeLost, "no node of the fleet answers")
                .with_hint("GET /healthz of each daemon says why; GET /v1/nodes lists them")
        })
}

/// A node that has the snapshot. The view may be a second old, so a tag that it lacks is looked for.
pub async fn holder(nodes: &Nodes, tag: &str) -> Answer<NodeName> {
    holders(nodes, tag).await.map(|mut all| all.swap_remove(0))
}

/// All nodes that have the snapshot, at least one.
pub async fn holders(nodes: &Nodes, tag: &str) -> Answer<Vec<NodeName>> {
    for attempt in 0..2 {
        let view = nodes.view();
        let found: Vec<NodeName> = view.holders(tag).map(|(name, _)| name.clone()).collect();
        if !found.is_empty() {
            return Ok(found);
        }
        if attempt == 0 {
            nodes.look().await;
        }
    }
    let tag: String = tag.chars().take(64).collect();
    Err(Failure::new(
        ErrorCode::SnapshotNotFound,
        format!("no node that answers has a snapshot {tag}"),
    ))
}

/// The node that has the workspace.
pub async fn host_of(nodes: &Nodes, name: &str) -> Answer<NodeName> {
    for attempt in 0..2 {
        if let Some(node) = nodes.view().host_of_workspace(name) {
            return Ok(node.clone());
        }
        if attempt == 0 {
            nodes.look().await;
        }
    }
    let name: String = name.chars().take(64).collect();
    Err(Failure::new(
        ErrorCode::WorkspaceNotFound,
        format!("no node that answers has a workspace {name}"),
    ))
}

/// The refusal of an ID without a node.
pub fn no_node(id: &SandboxId) -> Failure {
    Failure::new(
        ErrorCode::SandboxNotFound,
        format!("the ID {id} names no node of the fleet"),
    )
    .with_hint("it was made by a daemon without --node: ask that daemon")
}
