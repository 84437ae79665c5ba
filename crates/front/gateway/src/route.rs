//! The way of a request, decided by its method and path alone.

use axum::http::Method;
use forkd_api::ErrorCode;
use forkd_edge::errors::Failure;
use forkd_types::{NodeName, SandboxId};

/// The list that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum List {
    Sandboxes,
    Stats,
    Snapshots,
    Workspaces,
    Images,
}

/// The way of a request through the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    /// The gateway answers: is it well.
    Health,
    /// The gateway answers: its version.
    Version,
    /// The gateway answers: its metrics.
    Metrics,
    /// The gateway answers: the list of nodes.
    Nodes,
    /// A named node gets this path.
    Node { name: NodeName, path: String },
    /// The node of the sandbox.
    Sandbox(SandboxId),
    /// New sandboxes, placed.
    Create,
    /// A new snapshot, placed.
    Build,
    /// A new workspace, placed.
    CreateWorkspace,
    /// The lists of all nodes as one.
    List(List),
    /// The events of all nodes as one stream.
    Events,
    /// The nodes that have the snapshot.
    Snapshot(String),
    /// The node that has the workspace.
    Workspace(String),
    /// Any node: all answer the same.
    Any,
    /// Refused: it belongs to one node.
    PerNode,
}

/// Decides on a request.
pub fn route(method: &Method, path: &str) -> Result<Route, Failure> {
    let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
    let get = matches!(*method, Method::GET | Method::HEAD);
    Ok(match segments.as_slice() {
        ["healthz"] => Route::Health,
        ["version"] => Route::Version,
        ["metrics"] => Route::Metrics,
        ["openapi.json"] | ["v1", "status"] => Route::Any,
        ["v1", "nodes"] if get => Route::Nodes,
        ["v1", "nodes", name] => Route::Node {
            name: node_name(name)?,
            path: forkd_api::routes::NODE.to_owned(),
        },
        ["v1", "nodes", name, ..] => Route::Node {
            name: node_name(name)?,
            path: rest_of(path),
        },
        ["v1", "sandboxes"] if get => Route::List(List::Sandboxes),
        ["v1", "sandboxes"] => Route::Create,
        ["v1", "sandboxes", id, ..] => Route::Sandbox(
            id.parse()
                .map_err(|error| Failure::new(ErrorCode::InvalidName, format!("{error}")))?,
        ),
        ["v1", "stats"] => Route::List(List::Stats),
        ["v1", "images"] => Route::List(List::Images),
        ["v1", "snapshots"] if get => Route::List(List::Snapshots),
        ["v1", "snapshots"] => Route::Build,
        ["v1", "snapshots", tag, ..] => Route::Snapshot((*tag).to_owned()),
        ["v1", "workspaces"] if get => Route::List(List::Workspaces),
        ["v1", "workspaces"] => Route::CreateWorkspace,
        ["v1", "workspaces", name, ..] => Route::Workspace((*name).to_owned()),
        ["v1", "events"] => Route::Events,
        ["mcp"]
        | ["v1", "node"]
        | [
            "v1",
            "builds" | "hub" | "images" | "operations" | "store" | "tokens" | "volumes",
            ..,
        ] => Route::PerNode,
        _ => {
            let path: String = path.chars().take(200).collect();
            let text = format!("there is no route {path} of a fleet");
            return Err(Failure::new(ErrorCode::NoSuchRoute, text)
                .with_hint("a route of one node is reached by /v1/nodes/NAME and then its path"));
        }
    })
}

fn node_name(text: &str) -> Result<NodeName, Failure> {
    text.parse()
        .map_err(|error| Failure::new(ErrorCode::InvalidName, format!("{error}")))
}

/// The path behind `/v1/nodes/NAME`, as it was sent.
fn rest_of(path: &str) -> String {
    let rest = path.splitn(5, '/').nth(4).unwrap_or_default();
    format!("/{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(path: &str) -> Route {
        route(&Method::GET, path).unwrap()
    }

    #[test]
    fn a_sandbox_goes_to_the_node_in_its_id() {
        let path = "/v1/sandboxes/sbk3f9q6917a1b20f3c9a51d2e4b687/exec/stream";
        let Route::Sandbox(id) = route(&Method::POST, path).unwrap() else {
            panic!("{path}");
        };
        assert_eq!(id.node().unwrap().as_str(), "k3f9q");
        assert!(route(&Method::GET, "/v1/sandboxes/nonsense!").is_err());
    }

    #[test]
    fn lists_are_merged_and_posts_are_placed() {
        assert_eq!(get("/v1/sandboxes"), Route::List(List::Sandboxes));
        assert_eq!(
            route(&Method::POST, "/v1/sandboxes").unwrap(),
            Route::Create
        );
        assert_eq!(route(&Method::POST, "/v1/snapshots").unwrap(), Route::Build);
        assert_eq!(
            get("/v1/snapshots/py/info"),
            Route::Snapshot("py".to_owned())
        );
        assert_eq!(get("/v1/store"), Route::PerNode);
        assert!(route(&Method::GET, "/v2/x").is_err());
    }

    #[test]
    fn a_node_is_reached_by_its_name() {
        let node = |path: &str| match get(path) {
            Route::Node { name, path } => (name.to_string(), path),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            node("/v1/nodes/node1"),
            ("node1".to_owned(), "/v1/node".to_owned())
        );
        let (name, path) = node("/v1/nodes/node1/v1/store/fsck");
        assert_eq!((name.as_str(), path.as_str()), ("node1", "/v1/store/fsck"));
        assert!(route(&Method::GET, "/v1/nodes/../v1/x").is_err());
    }

    #[test]
    fn every_route_of_a_daemon_is_decided() {
        for path in forkd_api::routes::ALL {
            let filled = forkd_api::routes::fill(path, &["sb6917a1b20f3c9a51d2e4b687", "1"]);
            for method in [Method::GET, Method::POST, Method::DELETE] {
                assert!(route(&method, &filled).is_ok(), "{method} {filled}");
            }
        }
    }
}
