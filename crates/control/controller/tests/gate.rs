//! Requests that are refused before a handler sees them.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use forkd_controller::serve::Front;
use forkd_edge::config::{EdgeConfig, RequestLimits};
use forkd_edge::listen::Peer;
use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;
use tower::ServiceExt;

fn open(dir: &Path, edge: EdgeConfig) -> (Arc<App>, Router) {
    open_with(Config::below(dir), edge)
}

fn open_with(config: Config, edge: EdgeConfig) -> (Arc<App>, Router) {
    let (app, _endings) = App::open(config).unwrap();
    let router = Front::open(&app, &edge).unwrap().router;
    (app, router)
}

/// A request over TCP.
async fn send(
    router: &Router,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> Response<Body> {
    let mut request = Request::builder().method(method).uri(path).extension(Peer {
        remote: "127.0.0.1:5".into(),
        address: Some([127, 0, 0, 1].into()),
        trusted: None,
    });
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::empty()).unwrap();
    router.clone().oneshot(request).await.unwrap()
}

async fn text(response: Response<Body>) -> String {
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await;
    String::from_utf8(bytes.unwrap().to_vec()).unwrap()
}

#[tokio::test]
async fn web_pages_of_elsewhere_do_not_reach_a_daemon_without_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let (_app, open) = open(
        dir.path(),
        EdgeConfig {
            allowed_hosts: vec!["build.example".into()],
            ..EdgeConfig::closed()
        },
    );
    let host = ("host", "127.0.0.1:8889");
    let status = async |method, path, headers: &[(&str, &str)]| {
        send(&open, method, path, headers).await.status().as_u16()
    };
    let list = "/v1/sandboxes";
    assert_eq!(status("GET", list, &[host]).await, 200);
    assert_eq!(
        status("GET", list, &[("host", "build.example:1")]).await,
        200
    );
    assert_eq!(
        status("GET", list, &[("host", "rebound.example")]).await,
        403
    );
    assert_eq!(status("GET", list, &[]).await, 403);
    let foreign = ("origin", "https://rebound.example");
    assert_eq!(status("GET", list, &[host, foreign]).await, 403);
    let terminal = "/v1/sandboxes/sb-1/terminal";
    assert_eq!(status("GET", terminal, &[host, foreign]).await, 403);
    let cross = ("sec-fetch-site", "cross-site");
    let fsck = "/v1/store/fsck";
    assert_eq!(status("POST", fsck, &[host, cross]).await, 403);
    // A form, as a browser sends it without asking.
    let form = ("content-type", "application/x-www-form-urlencoded");
    assert_eq!(status("POST", fsck, &[host, form]).await, 415);
    // As the published clients send it.
    assert_eq!(status("POST", fsck, &[host]).await, 200);
    let json = ("content-type", "application/json");
    assert_eq!(status("POST", fsck, &[host, json]).await, 200);
    // The health check needs no token.
    assert_ne!(status("GET", "/healthz", &[]).await, 403);
}

#[tokio::test]
async fn a_token_is_proof_enough_of_where_a_request_comes_from() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "correct-horse-battery").unwrap();
    let (_app, closed) = open(
        dir.path(),
        EdgeConfig {
            token_file: Some(token),
            ..EdgeConfig::closed()
        },
    );
    let bearer = ("authorization", "Bearer correct-horse-battery");
    let name = ("host", "forkd.example");
    let answer = send(&closed, "GET", "/v1/sandboxes", &[name, bearer]).await;
    assert_eq!(answer.status(), 200);
    let answer = send(&closed, "GET", "/v1/sandboxes", &[name]).await;
    assert_eq!(answer.status(), 401);
}

#[tokio::test]
async fn a_stream_holds_its_slot_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (_app, router) = open(
        dir.path(),
        EdgeConfig {
            requests: RequestLimits {
                total: 8,
                per_owner: 2,
                per_second: 0,
            },
            ..EdgeConfig::closed()
        },
    );
    let host = [("host", "localhost")];
    let first = send(&router, "GET", "/v1/events", &host).await;
    let second = send(&router, "GET", "/v1/events", &host).await;
    assert_eq!(second.status(), 200);
    let refused = send(&router, "GET", "/version", &host).await;
    assert_eq!(refused.status(), 429);
    // Neither the health nor a guest's own requests wait for these slots.
    let health = send(&router, "GET", "/healthz", &host).await;
    assert_ne!(health.status(), 429);
    let ping = send(&router, "POST", "/v1/sandboxes/sb-1/ping", &host).await;
    assert_eq!(ping.status(), 404);
    drop(first);
    let answer = send(&router, "GET", "/version", &host).await;
    assert_eq!(answer.status(), 200);
}

#[tokio::test]
async fn the_health_shows_no_paths_to_strangers_and_starts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "correct-horse-battery").unwrap();
    let mark = dir.path().join("started");
    let spawn = dir.path().join("forkd-spawn");
    std::fs::write(&spawn, format!("#!/bin/sh\ntouch {}\n", mark.display())).unwrap();
    std::fs::set_permissions(&spawn, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (_app, router) = open_with(
        Config {
            spawn_program: spawn,
            ..Config::below(dir.path())
        },
        EdgeConfig {
            token_file: Some(token),
            ..EdgeConfig::closed()
        },
    );
    let stranger = send(&router, "GET", "/healthz", &[]).await;
    assert_eq!(stranger.status(), 503);
    let shown = text(stranger).await;
    assert!(shown.contains("forkd-spawn does not work"), "{shown}");
    assert!(!shown.contains(dir.path().to_str().unwrap()), "{shown}");
    let bearer = ("authorization", "Bearer correct-horse-battery");
    let shown = text(send(&router, "GET", "/healthz", &[bearer]).await).await;
    assert!(shown.contains(dir.path().to_str().unwrap()), "{shown}");
    assert!(!mark.exists(), "forkd-spawn was started");
}
