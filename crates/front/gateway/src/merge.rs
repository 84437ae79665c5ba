//! Lists and streams of all nodes as one.

use axum::Json;
use axum::body::{Body, BodyDataStream, to_bytes};
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, header};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use forkd_api::ErrorCode;
use forkd_edge::errors::{Answer, Failure};
use forkd_types::NodeName;
use futures::future::join_all;
use futures::stream::{self, StreamExt};
use serde_json::Value;

use crate::create::MAX_ANSWER;
use crate::nodes::Nodes;
use crate::route::List;
use crate::{own, pass};

/// Names the nodes whose entries are missing in a list.
const MISSING: &str = "x-forkd-missing-nodes";
/// Names the last entry of a page that others follow.
const NEXT: &str = "x-next-after";
/// The longest item of a stream.
const MAX_ITEM: usize = 1 << 20;

/// One list of the entries of all nodes. A node that does not answer is named in a header.
pub async fn list(nodes: &Nodes, list: List, request: Request) -> Answer<Response> {
    own::any(nodes)?;
    let (parts, _) = request.into_parts();
    let names: Vec<NodeName> = nodes.view().nodes.keys().cloned().collect();
    let asked = join_all(names.iter().map(|name| entries(nodes, name, &parts))).await;
    let mut all = Vec::new();
    let mut missing: Vec<String> = unreachable(nodes);
    let mut more = false;
    for (name, outcome) in names.iter().zip(asked) {
        match outcome {
            Ok(Entries::Found { entries, has_more }) => {
                all.extend(entries);
                more |= has_more;
            }
            // A node that refuses does so for a reason that holds for all.
            Ok(Entries::Refused(answer)) => return Ok(answer),
            Err(_) => missing.push(name.to_string()),
        }
    }
    let next = sort(list, &mut all, limit(&parts), more);
    let mut response = Json(all).into_response();
    let mut put = |name: &'static str, value: String| {
        if let Ok(value) = HeaderValue::try_from(value) {
            response.headers_mut().insert(name, value);
        }
    };
    if !missing.is_empty() {
        put(MISSING, missing.join(","));
    }
    if let Some(next) = next {
        put(NEXT, next);
    }
    Ok(response)
}

fn unreachable(nodes: &Nodes) -> Vec<String> {
    let lost = nodes.status().into_iter().filter(|node| !node.reachable);
    lost.map(|node| node.node.and_then(|node| node.name).unwrap_or(node.url))
        .collect()
}

enum Entries {
    Found { entries: Vec<Value>, has_more: bool },
    Refused(Response),
}

async fn entries(nodes: &Nodes, name: &NodeName, parts: &Parts) -> Answer<Entries> {
    let answer = pass::with_body(nodes, name, parts, Bytes::new()).await?;
    let (head, body) = answer.into_parts();
    let broken = |_| Failure::new(ErrorCode::NodeLost, format!("the list of {name} broke off"));
    let bytes = to_bytes(body, MAX_ANSWER).await.map_err(broken)?;
    if !head.status.is_success() {
        return Ok(Entries::Refused(Response::from_parts(head, bytes.into())));
    }
    match serde_json::from_slice(&bytes) {
        Ok(Value::Array(entries)) => Ok(Entries::Found {
            entries,
            has_more: head.headers.contains_key(NEXT),
        }),
        _ => Err(Failure::new(
            ErrorCode::Internal,
            format!("the node {name} did not answer with a list"),
        )),
    }
}

/// Sorts a list by its key, drops what several nodes have, and cuts it to a page. Returns the last ID of a page that others
/// follow; `more` says that a node has more than it returned.
fn sort(list: List, all: &mut Vec<Value>, limit: Option<usize>, more: bool) -> Option<String> {
    let field = match list {
        List::Sandboxes | List::Stats => "id",
        List::Snapshots => "tag",
        List::Workspaces | List::Images => "name",
    };
    let key = |entry: &Value| {
        entry
            .get(field)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    all.sort_by_cached_key(key);
    if matches!(list, List::Snapshots | List::Images) {
        all.dedup_by_key(|entry| key(entry));
    }
    let limit = limit.filter(|limit| more || *limit < all.len())?;
    all.truncate(limit);
    all.last().map(key)
}

/// The size of a page. The nodes have checked it, and each returns at most that many and says whether it has more.
fn limit(parts: &Parts) -> Option<usize> {
    let query = parts.uri.query()?;
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.find(|(name, _)| *name == "limit")?.1.parse().ok()
}

/// Sends a request to every node that has the snapshot. The first refusal is the answer.
pub async fn at_holders(nodes: &Nodes, tag: &str, request: Request) -> Answer<Response> {
    let holders = own::holders(nodes, tag).await?;
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, MAX_ITEM)
        .await
        .map_err(|_| Failure::new(ErrorCode::TooLarge, "the body is too large"))?;
    let mut last = None;
    for node in &holders {
        let answer = pass::with_body(nodes, node, &parts, body.clone()).await?;
        if !answer.status().is_success() {
            return Ok(answer);
        }
        last = Some(answer);
    }
    if parts.method == Method::DELETE {
        nodes.look().await;
    }
    last.ok_or_else(|| Failure::new(ErrorCode::SnapshotNotFound, "no node has the snapshot"))
}

/// One stream of the events of all nodes that answer now. It ends when a node goes away, so that the client asks again.
pub async fn events(nodes: &Nodes, request: Request) -> Answer<Response> {
    own::any(nodes)?;
    let (parts, _) = request.into_parts();
    let names: Vec<NodeName> = nodes.view().nodes.keys().cloned().collect();
    let sse = parts
        .headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.contains("text/event-stream"));
    let end: &'static [u8] = if sse { b"\n\n" } else { b"\n" };
    let mut streams = Vec::new();
    let mut head = None;
    for name in &names {
        let answer = pass::with_body(nodes, name, &parts, Bytes::new()).await?;
        if !answer.status().is_success() {
            return Ok(answer);
        }
        let (parts, body) = answer.into_parts();
        head.get_or_insert(parts);
        streams.push(
            items(body, end)
                .map(Some)
                .chain(stream::once(async { None }))
                .boxed(),
        );
    }
    // The end of one is the end of all.
    let joined = stream::select_all(streams)
        .take_while(|item| std::future::ready(item.is_some()))
        .filter_map(std::future::ready)
        .map(Ok::<Bytes, std::io::Error>);
    let mut response = Response::new(Body::from_stream(joined));
    if let Some(head) = head {
        *response.headers_mut() = head.headers;
        response.headers_mut().remove(header::CONTENT_LENGTH);
    }
    Ok(response)
}

/// A body as whole items, so that those of several nodes do not mix.
fn items(body: Body, end: &'static [u8]) -> impl stream::Stream<Item = Bytes> + Send {
    let state = (body.into_data_stream(), BytesMut::new());
    stream::unfold(state, move |(body, held)| next_item(body, held, end))
}

/// The next item of a body, and the rest. None at its end, and for an item that is too long.
async fn next_item(
    mut body: BodyDataStream,
    mut held: BytesMut,
    end: &[u8],
) -> Option<(Bytes, (BodyDataStream, BytesMut))> {
    loop {
        let found = held.windows(end.len()).position(|window| window == end);
        if let Some(at) = found {
            let item = held.split_to(at + end.len()).freeze();
            return Some((item, (body, held)));
        }
        if held.len() > MAX_ITEM {
            return None;
        }
        match body.next().await {
            Some(Ok(chunk)) => held.extend_from_slice(&chunk),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_page_is_cut_over_all_nodes() {
        let mut all = vec![json!({"id": "c"}), json!({"id": "a"}), json!({"id": "b"})];
        let next = Some("b".to_owned());
        assert_eq!(sort(List::Sandboxes, &mut all, Some(2), false), next);
        assert_eq!(all, [json!({"id": "a"}), json!({"id": "b"})]);
        assert_eq!(sort(List::Sandboxes, &mut all, Some(2), false), None);
        assert_eq!(sort(List::Sandboxes, &mut all, Some(2), true), next);
        assert_eq!(sort(List::Sandboxes, &mut all, None, false), None);
    }

    #[test]
    fn a_snapshot_on_several_nodes_is_one() {
        let mut all = vec![
            json!({"tag": "py"}),
            json!({"tag": "a"}),
            json!({"tag": "py"}),
        ];
        sort(List::Snapshots, &mut all, None, false);
        assert_eq!(all.len(), 2);
    }

    #[tokio::test]
    async fn items_of_a_stream_stay_whole() {
        let parts: Vec<Result<Bytes, std::io::Error>> = ["{\"a\":", "1}\n{\"b\"", ":2}\n", "rest"]
            .map(|p| Ok(Bytes::from(p)))
            .into();
        let body = Body::from_stream(stream::iter(parts));
        let found: Vec<Bytes> = items(body, b"\n").collect().await;
        assert_eq!(found, ["{\"a\":1}\n", "{\"b\":2}\n"]);
    }
}
