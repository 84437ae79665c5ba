//! Which surface a request is for.
//!
//! The decision is made for each request, because the SDKs send requests for the API and for several sandboxes over one
//! connection. A control path with a key comes first: early SDKs put the headers of a sandbox on control requests.

use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, Request, Uri};
use forkd_types::SandboxId;

use super::state::E2b;
use super::target::Target;

/// The port of envd: processes and files.
pub const ENVD_PORT: u16 = 49983;
/// The port of the code interpreter.
pub const INTERPRETER_PORT: u16 = 49999;

/// A part of the plane with its own routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surface {
    /// The API of the service.
    Control,
    Envd,
    /// The execution of code.
    Interpreter,
    /// A server in the guest.
    Proxy,
}

/// First segments of control paths.
const CONTROL: &[&str] = &[
    "sandboxes",
    "templates",
    "snapshots",
    "volumes",
    "secrets",
    "default-templates",
    "teams",
];

/// Whether a path is one of the control API.
fn is_control(path: &str) -> bool {
    let mut segments = path.trim_start_matches('/').split('/');
    let first = segments.next().unwrap_or_default();
    // The REST plane has /v1.
    let name = match first {
        "v2" | "v3" => segments.next().unwrap_or_default(),
        other => other,
    };
    CONTROL.contains(&name)
}

/// The surface and the sandbox of a request; none if the request is not for this plane.
pub fn classify<B>(e2b: &E2b, request: &Request<B>) -> Option<(Surface, Option<Target>)> {
    let path = request.uri().path();
    let headers = request.headers();
    if headers.contains_key("x-api-key") && is_control(path) {
        return Some((Surface::Control, None));
    }
    let target = by_headers(headers)
        .or_else(|| {
            let domain = e2b.config.domain.as_ref()?;
            let (port, id) = domain.names(request.uri(), headers)?;
            Some(Target::new(&id, port))
        })
        .or_else(|| by_signature(e2b, request.uri()));
    if let Some(target) = target {
        let surface = match target.port {
            ENVD_PORT => Surface::Envd,
            INTERPRETER_PORT => Surface::Interpreter,
            _ => Surface::Proxy,
        };
        return Some((surface, Some(target)));
    }
    is_control(path).then_some((Surface::Control, None))
}

fn by_headers(headers: &HeaderMap) -> Option<Target> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let id = text("e2b-sandbox-id")?;
    let port = match text("e2b-sandbox-port") {
        // A port that is no number is a port on which nothing listens.
        Some(port) => port.parse().unwrap_or(0),
        None => ENVD_PORT,
    };
    Some(Target::new(id, port))
}

/// A signed URL names no sandbox: the sandbox is the one whose token makes the signature.
fn by_signature(e2b: &E2b, uri: &Uri) -> Option<Target> {
    if uri.path().trim_start_matches('/') != "files" {
        return None;
    }
    let query = super::text::query(uri.query().unwrap_or_default());
    let signature = super::text::value(&query, "signature")?;
    let found = e2b
        .app
        .sandboxes
        .list()
        .into_iter()
        .find(|sandbox| e2b.signs(&sandbox.id, &query, signature).is_some());
    Some(match found {
        Some(sandbox) => Target::of(sandbox.id.clone(), ENVD_PORT),
        None => Target::new("unknown", ENVD_PORT),
    })
}

/// Removes slashes that a base URL with a slash at its end puts before the path.
pub fn collapse_slashes(uri: &mut Uri) {
    let Some(sent) = uri.path_and_query().map(PathAndQuery::as_str) else {
        return;
    };
    if !sent.starts_with("//") {
        return;
    }
    let path = format!("/{}", sent.trim_start_matches('/'));
    let mut parts = std::mem::take(uri).into_parts();
    parts.path_and_query = path.parse().ok();
    *uri = Uri::from_parts(parts).unwrap_or_default();
}

/// A sandbox ID as it stands in a path.
pub fn parse_id(text: &str) -> Option<SandboxId> {
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_paths_are_told_from_those_of_other_planes() {
        for path in [
            "/sandboxes",
            "/v2/sandboxes/x/connect",
            "/v3/templates",
            "/templates/a%2Fb",
            "//sandboxes",
        ] {
            assert!(is_control(path), "{path}");
        }
        for path in [
            "/v1/sandboxes",
            "/",
            "/healthz",
            "/files",
            "/v2",
            "/sandboxesx",
        ] {
            assert!(!is_control(path), "{path}");
        }
    }

    #[test]
    fn double_slashes_collapse() {
        for (sent, expected) in [
            ("//execute?a=1", "/execute?a=1"),
            ("/a//b", "/a//b"),
            ("///x", "/x"),
        ] {
            let mut uri: Uri = format!("http://h{sent}").parse().unwrap();
            collapse_slashes(&mut uri);
            assert_eq!(uri.path_and_query().unwrap().as_str(), expected);
        }
    }
}
