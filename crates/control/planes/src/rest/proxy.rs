//! The route that passes HTTP requests of the owner on to a server in the guest.

use std::sync::Arc;

use axum::extract::{Extension, Path, Request};
use axum::http::{Uri, header};
use axum::response::Response;
use forkd_api::ErrorCode;

use super::owned::OwnedSandbox;
use crate::ports::Ports;
use crate::ports::pass::pass_on;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::Held;

/// A port in a path.
pub fn parse_port(text: &str) -> Result<u16, Failure> {
    let port: Option<u16> = text.parse().ok();
    port.filter(|port| *port > 0)
        .ok_or_else(|| Failure::new(ErrorCode::InvalidRequest, "a port is 1 to 65535"))
}

/// Passes a request on to a port of the guest. The guest is not trusted with the client's token, so the request goes on
/// without `Authorization`.
pub async fn proxy(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<Vec<(String, String)>>,
    Extension(ports): Extension<Arc<Ports>>,
    held: Held,
    mut request: Request,
) -> Answer<Response> {
    let port = path.iter().find(|(name, _)| name == "port");
    let port = parse_port(port.map_or("", |(_, text)| text))?;
    let target = target(request.uri())?;
    ports.strip(request.headers_mut());
    request.headers_mut().remove(header::AUTHORIZATION);
    pass_on(&sandbox, port, target, held, request).await
}

/// The path and query behind the port, as the client sent them.
fn target(uri: &Uri) -> Result<Uri, Failure> {
    let sent = uri.path_and_query().map_or("/", |sent| sent.as_str());
    // /v1/sandboxes/{id}/proxy/{port}/rest
    let rest = sent.splitn(7, '/').nth(6).unwrap_or_default();
    let query = match (rest, uri.query()) {
        ("", Some(query)) => format!("?{query}"),
        _ => String::new(),
    };
    format!("/{rest}{query}")
        .parse()
        .map_err(|_| Failure::new(ErrorCode::InvalidRequest, "the path cannot be passed on"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_the_path_is_passed_on_as_it_was_sent() {
        for (sent, expected) in [
            ("/v1/sandboxes/sb-1/proxy/80/a/b%2Fc?q=1", "/a/b%2Fc?q=1"),
            ("/v1/sandboxes/sb-1/proxy/80/", "/"),
            ("/v1/sandboxes/sb-1/proxy/80", "/"),
            ("/v1/sandboxes/sb-1/proxy/80?q=1", "/?q=1"),
        ] {
            assert_eq!(target(&sent.parse().unwrap()).unwrap(), expected);
        }
    }
}
