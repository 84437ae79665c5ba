//! The route that passes HTTP requests on to a server in the guest.
//!
//! Each request gets a connection of its own through the agent, so servers that listen on 127.0.0.1 of the guest are
//! reached, and the guest needs no network. Bodies are streamed in both directions, and an upgrade (WebSocket) is passed
//! on. The connection ends with the sandbox, with a roll-back, and with either side.
//!
//! The guest is not trusted with the client's token: the request goes on without `Authorization` and cookies for the
//! daemon do not exist.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Request};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::Response;
use forkd_agent_client::Error as AgentError;
use forkd_api::ErrorCode;
use forkd_guest_proto as guest;
use hyper::client::conn::http1;
use hyper::upgrade;
use hyper_util::rt::TokioIo;

use super::owned::OwnedSandbox;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::Held;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::sandbox::SandboxHandle;

/// How long a server in the guest may take to begin its answer.
const ANSWER: Duration = Duration::from_secs(300);

/// Headers that belong to one connection, and the token of the client.
const NOT_PASSED: &[&str] = &[
    "authorization",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
];

/// Passes a request on to a port of the guest.
pub async fn proxy(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<Vec<(String, String)>>,
    held: Held,
    request: Request,
) -> Answer<Response> {
    let port = path.iter().find(|(name, _)| name == "port");
    let port: u16 = port
        .and_then(|(_, text)| text.parse().ok())
        .filter(|port| *port > 0)
        .ok_or_else(|| Failure::new(ErrorCode::InvalidRequest, "a port is 1 to 65535"))?;
    let target = target(request.uri())?;
    pass_on(&sandbox, port, target, held, request).await
}

/// Passes a request on to a port of a guest, for this path.
pub async fn pass_on(
    sandbox: &SandboxHandle,
    port: u16,
    target: Uri,
    held: Held,
    request: Request,
) -> Answer<Response> {
    let client = sandbox.agent().await?;
    let dialled = client
        .by(agent_limits::answer())
        .dial(guest::DialRequest::Tcp(port.to_string()))
        .await
        .map_err(|error| not_connected(port, error))?;
    let broken = |_| unanswered(port);
    let (mut sender, connection) = http1::handshake(TokioIo::new(dialled.into_io()))
        .await
        .map_err(broken)?;
    tokio::spawn(connection.with_upgrades());
    let (request, mut ours) = prepare(request, target);
    let answer = tokio::time::timeout(ANSWER, sender.send_request(request));
    let mut answer = answer
        .await
        .map_err(|_| Failure::new(ErrorCode::Timeout, format!("port {port} did not answer")))?
        .map_err(broken)?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        let theirs = upgrade::on(&mut answer);
        tokio::spawn(async move {
            // An upgraded connection counts as a request until it ends.
            let _held = held;
            if let Some(ours) = ours.take()
                && let (Ok(ours), Ok(theirs)) = tokio::join!(ours, theirs)
            {
                let _ = tokio::io::copy_bidirectional(
                    &mut TokioIo::new(ours),
                    &mut TokioIo::new(theirs),
                )
                .await;
            }
        });
    } else {
        strip(answer.headers_mut());
    }
    Ok(answer.map(Body::new))
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

/// The request as the guest gets it, and the client's side of an upgrade if one is asked for.
fn prepare(mut request: Request, target: Uri) -> (Request, Option<upgrade::OnUpgrade>) {
    let wants = request.headers().contains_key(header::UPGRADE);
    let ours = wants.then(|| upgrade::on(&mut request));
    *request.uri_mut() = target;
    *request.version_mut() = axum::http::Version::HTTP_11;
    strip(request.headers_mut());
    if wants {
        let value = header::HeaderValue::from_static("Upgrade");
        request.headers_mut().insert(header::CONNECTION, value);
    } else {
        request.headers_mut().remove(header::CONNECTION);
    }
    (request, ours)
}

fn strip(headers: &mut HeaderMap) {
    for name in NOT_PASSED {
        headers.remove(*name);
    }
}

fn not_connected(port: u16, error: AgentError) -> Failure {
    let refused = rustix::io::Errno::CONNREFUSED.raw_os_error();
    match error {
        AgentError::Agent(answer) if answer.errno == Some(refused) => Failure::new(
            ErrorCode::PortClosed,
            format!("nothing listens on port {port} of the guest"),
        ),
        error => Error::agent(format!("port {port} of the guest cannot be reached"))(error).into(),
    }
}

fn unanswered(port: u16) -> Failure {
    Failure::new(
        ErrorCode::PortClosed,
        format!("the server on port {port} of the guest closed the connection"),
    )
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
        ] {
            assert_eq!(target(&sent.parse().unwrap()).unwrap(), expected);
        }
    }

    #[test]
    fn the_token_of_the_client_stays_here() {
        let request = Request::builder()
            .header("authorization", "Bearer secret")
            .header("connection", "keep-alive")
            .header("x-own", "1")
            .body(Body::empty())
            .unwrap();
        let (request, ours) = prepare(request, "/x".parse().unwrap());
        assert!(ours.is_none());
        let names: Vec<_> = request.headers().keys().map(|name| name.as_str()).collect();
        assert_eq!(names, ["x-own"]);
    }
}
