//! Passes an HTTP request on to a server in a guest.
//!
//! Each request gets a connection of its own through the agent. Nothing is pooled, so no connection outlives the era of
//! its sandbox: a roll-back breaks it, and the next request connects anew. Bodies are streamed in both directions, and an
//! upgrade (WebSocket) is passed on.
//!
//! The guest is spoken to in HTTP/1.1, whatever the client speaks, except for gRPC, which exists in HTTP/2 only.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, Version, header};
use axum::response::Response;
use forkd_agent_client::DialledIo;
use forkd_api::ErrorCode;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::Held;
use forkd_sandboxes::ports::{dial, relay};
use forkd_sandboxes::sandbox::SandboxHandle;
use hyper::client::conn::{http1, http2};
use hyper::upgrade::{self, OnUpgrade};
use hyper_util::rt::{TokioExecutor, TokioIo};

/// How long a server in the guest may take to begin its answer.
const ANSWER: Duration = Duration::from_secs(300);

/// Headers that belong to one connection.
const OF_CONNECTION: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Passes a request on to a port of a guest, for this path.
pub async fn pass_on(
    sandbox: &Arc<SandboxHandle>,
    port: u16,
    target: Uri,
    held: Held,
    request: Request,
) -> Answer<Response> {
    let guest = dial(sandbox, port).await?;
    if is_grpc(&request) {
        return over_http2(guest, port, target, request).await;
    }
    let (mut sender, connection) = http1::handshake(TokioIo::new(guest))
        .await
        .map_err(|_| unanswered(port))?;
    tokio::spawn(connection.with_upgrades());
    let (request, ours) = prepare(request, target);
    let mut answer = answered(port, sender.send_request(request)).await?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        let theirs = upgrade::on(&mut answer);
        tokio::spawn(async move {
            // An upgraded connection counts as a request until it ends.
            let _held = held;
            if let Some(ours) = ours
                && let (Ok(ours), Ok(theirs)) = tokio::join!(ours, theirs)
            {
                let mut ours = TokioIo::new(ours);
                let mut theirs = TokioIo::new(theirs);
                let _ = tokio::io::copy_bidirectional(&mut ours, &mut theirs).await;
            }
        });
    } else {
        strip(answer.headers_mut());
    }
    Ok(answer.map(Body::new))
}

/// Upgrades the connection of a client to a byte stream from and to a port of the guest.
pub fn connect(ours: OnUpgrade, guest: DialledIo, held: Held) {
    tokio::spawn(async move {
        let _held = held;
        if let Ok(ours) = ours.await {
            let _ = relay(TokioIo::new(ours), guest).await;
        }
    });
}

async fn answered<T>(
    port: u16,
    answer: impl Future<Output = Result<T, hyper::Error>>,
) -> Answer<T> {
    tokio::time::timeout(ANSWER, answer)
        .await
        .map_err(|_| Failure::new(ErrorCode::Timeout, format!("port {port} did not answer")))?
        .map_err(|_| unanswered(port))
}

/// gRPC needs trailers and two streams at once, which HTTP/1.1 does not give it.
fn is_grpc(request: &Request) -> bool {
    let kind = request.headers().get(header::CONTENT_TYPE);
    request.version() == Version::HTTP_2
        && kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

async fn over_http2(
    guest: DialledIo,
    port: u16,
    target: Uri,
    mut request: Request,
) -> Answer<Response> {
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(guest))
        .await
        .map_err(|_| unanswered(port))?;
    tokio::spawn(connection);
    let authority = request.uri().authority().cloned();
    let mut parts = target.into_parts();
    parts.scheme = Some(axum::http::uri::Scheme::HTTP);
    parts.authority = authority.or_else(|| "localhost".parse().ok());
    *request.uri_mut() = Uri::from_parts(parts)
        .map_err(|_| Failure::new(ErrorCode::InvalidRequest, "the path cannot be passed on"))?;
    strip(request.headers_mut());
    request
        .headers_mut()
        .insert(header::TE, HeaderValue::from_static("trailers"));
    let answer = answered(port, sender.send_request(request)).await?;
    Ok(answer.map(Body::new))
}

/// The request as the guest gets it, and the client's side of an upgrade if one is asked for.
fn prepare(mut request: Request, target: Uri) -> (Request, Option<OnUpgrade>) {
    let protocol = request.headers().get(header::UPGRADE).cloned();
    let ours = protocol.is_some().then(|| upgrade::on(&mut request));
    // HTTP/2 has the host in the URI.
    let authority = request.uri().authority();
    let host = authority.and_then(|host| HeaderValue::from_str(host.as_str()).ok());
    *request.uri_mut() = target;
    *request.version_mut() = Version::HTTP_11;
    let headers = request.headers_mut();
    strip(headers);
    join_cookies(headers);
    if let Some(host) = host {
        headers.entry(header::HOST).or_insert(host);
    }
    if let Some(protocol) = protocol {
        headers.insert(header::UPGRADE, protocol);
        headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    }
    (request, ours)
}

/// HTTP/2 clients send each cookie in a header of its own; HTTP/1.1 allows one header.
fn join_cookies(headers: &mut HeaderMap) {
    let all: Vec<&[u8]> = headers
        .get_all(header::COOKIE)
        .iter()
        .map(HeaderValue::as_bytes)
        .collect();
    if all.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&all.join(&b"; "[..]))
    {
        headers.insert(header::COOKIE, joined);
    }
}

/// Removes headers that belong to one connection, those that `Connection` names included.
fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in OF_CONNECTION {
        headers.remove(*name);
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
    fn a_request_over_http2_becomes_one_of_http1() {
        let request = Request::builder()
            .version(Version::HTTP_2)
            .uri("https://3000-sb1.box.test/a")
            .header("cookie", "a=1")
            .header("cookie", "b=2")
            .header("te", "trailers")
            .body(Body::empty())
            .unwrap();
        let (request, ours) = prepare(request, "/a?b".parse().unwrap());
        assert!(ours.is_none());
        assert_eq!(
            (request.version(), request.uri()),
            (Version::HTTP_11, &"/a?b".parse().unwrap())
        );
        let mut headers: Vec<_> = request
            .headers()
            .iter()
            .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
            .collect();
        headers.sort_unstable();
        assert_eq!(
            headers,
            [("cookie", "a=1; b=2"), ("host", "3000-sb1.box.test")]
        );
    }

    #[test]
    fn headers_of_the_connection_stay_here_and_an_upgrade_goes_on() {
        let request = Request::builder()
            .header("connection", "Upgrade, X-Hop")
            .header("upgrade", "websocket")
            .header("x-hop", "1")
            .header("x-own", "1")
            .body(Body::empty())
            .unwrap();
        let (request, ours) = prepare(request, "/x".parse().unwrap());
        assert!(ours.is_some());
        let mut names: Vec<_> = request.headers().keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["connection", "upgrade", "x-own"]);
        assert_eq!(request.headers()["connection"], "Upgrade");
    }
}
