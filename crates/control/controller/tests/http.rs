//! The daemon from outside, as far as no VM is needed.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use forkd_api::{ErrorCode, routes};
use forkd_controller::serve::Front;
use forkd_edge::config::{EdgeConfig, ListenAddr, TlsFiles};
use forkd_edge::listen::{self, Bound, Limits, Server};
use forkd_planes::rest::{openapi, openapi_text};
use forkd_rest_client::Client;
use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;
use parking_lot::RwLock;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

struct Daemon {
    _app: Arc<App>,
    edge: EdgeConfig,
    router: Router,
    _dir: tempfile::TempDir,
}

impl Daemon {
    fn new(token: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let token_file = token.map(|token| {
            let path = root.join("token");
            std::fs::write(&path, token).unwrap();
            path
        });
        let edge = EdgeConfig {
            audit_log: Some(root.join("audit.log")),
            token_file,
            ..EdgeConfig::closed()
        };
        let (app, _endings) = App::open(Config::below(root)).unwrap();
        let front = Front::open(&app, &edge).unwrap();
        Self {
            _app: app,
            edge,
            router: front.router,
            _dir: dir,
        }
    }

    async fn send(&self, request: Request<Body>) -> Response<Body> {
        self.router().oneshot(request).await.unwrap()
    }

    fn router(&self) -> Router {
        self.router.clone()
    }

    /// Status and body of a request with a JSON body, or none.
    async fn call(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        let mut request = Request::builder().method(method).uri(path);
        let body = match body {
            Some(body) => {
                request = request.header("content-type", "application/json");
                Body::from(body.to_string())
            }
            None => Body::empty(),
        };
        answer(self.send(request.body(body).unwrap()).await).await
    }
}

async fn answer(response: Response<Body>) -> (u16, Value) {
    let status = response.status().as_u16();
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20)
        .await
        .unwrap();
    (
        status,
        serde_json::from_slice(&bytes).unwrap_or(Value::Null),
    )
}

#[tokio::test]
async fn every_error_is_json_with_a_code() {
    let daemon = Daemon::new(None);
    let long = "x".repeat(65);
    let cases = [
        ("GET", "/nowhere", None, 404, "no_such_route"),
        ("GET", "/v1/snapshots/", None, 404, "no_such_route"),
        ("PUT", "/v1/snapshots", None, 405, "method_not_allowed"),
        ("DELETE", "/v1/snapshots/a%2Fb", None, 400, "invalid_name"),
        (
            "DELETE",
            "/v1/snapshots/none",
            None,
            404,
            "snapshot_not_found",
        ),
        (
            "DELETE",
            "/v1/snapshots/none?cascade=1",
            None,
            400,
            "invalid_request",
        ),
        (
            "DELETE",
            "/v1/snapshots/none?cascade=true&force=true",
            None,
            400,
            "invalid_request",
        ),
        (
            "GET",
            "/v1/snapshots/none/info",
            None,
            404,
            "snapshot_not_found",
        ),
        (
            "POST",
            "/v1/snapshots/none/compact",
            Some(json!({"to": "x"})),
            404,
            "snapshot_not_found",
        ),
        (
            "POST",
            "/v1/snapshots/none/compact",
            Some(json!({"to": "none"})),
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({})),
            422,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({"tag": long})),
            400,
            "invalid_name",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({"tag": "t"})),
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({"tag": "t", "rootfs": "rel"})),
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({"tag": "t", "rootfs": "/etc/passwd"})),
            403,
            "forbidden",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({"tag": "t", "rootfs": "/no/such"})),
            403,
            "forbidden",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({"tag": "t", "image": "none"})),
            404,
            "image_not_found",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({"tag": "t", "image": "i", "boot_wait_secs": 61})),
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({"tag": "t", "image": "i", "vcpus": 33})),
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/snapshots",
            Some(json!({"tag": "t", "image": "i", "mem_size_mib": 1})),
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/sandboxes",
            Some(json!({"n": 1})),
            422,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/sandboxes",
            Some(json!({"snapshot_tag": "none"})),
            404,
            "snapshot_not_found",
        ),
        (
            "POST",
            "/v1/sandboxes",
            Some(json!({"snapshot_tag": "none", "n": 0})),
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/sandboxes",
            Some(json!({"snapshot_tag": "none", "n": 1001})),
            400,
            "invalid_request",
        ),
        (
            "POST",
            "/v1/sandboxes",
            Some(json!({"snapshot_tag": "../x"})),
            400,
            "invalid_name",
        ),
        ("GET", "/v1/sandboxes?limit=0", None, 400, "invalid_request"),
        (
            "GET",
            "/v1/sandboxes?state=odd",
            None,
            400,
            "invalid_request",
        ),
        ("GET", "/v1/sandboxes/sb-1", None, 404, "sandbox_not_found"),
        ("GET", "/v1/sandboxes/what", None, 404, "sandbox_not_found"),
        (
            "DELETE",
            "/v1/sandboxes/what/checkpoints/x",
            None,
            404,
            "sandbox_not_found",
        ),
        (
            "DELETE",
            "/v1/sandboxes/sb-1/checkpoints/%FF",
            None,
            400,
            "invalid_request",
        ),
        (
            "DELETE",
            "/v1/sandboxes/sb-1",
            None,
            404,
            "sandbox_not_found",
        ),
        (
            "POST",
            "/v1/sandboxes/sb-1/ping",
            None,
            404,
            "sandbox_not_found",
        ),
        (
            "POST",
            "/v1/sandboxes/sb-1/exec",
            Some(json!({"args": []})),
            404,
            "sandbox_not_found",
        ),
        (
            "POST",
            "/v1/sandboxes/sb-1/eval",
            Some(json!({"code": "1"})),
            404,
            "sandbox_not_found",
        ),
        (
            "POST",
            "/v1/sandboxes/sb-1/branch",
            Some(json!({})),
            404,
            "sandbox_not_found",
        ),
        (
            "POST",
            "/v1/sandboxes/sb-1/branch",
            Some(json!({"tag": "../x"})),
            404,
            "sandbox_not_found",
        ),
        (
            "POST",
            "/v1/sandboxes/sb-1/branch",
            Some(json!({"mode": "odd"})),
            404,
            "sandbox_not_found",
        ),
        (
            "GET",
            "/v1/sandboxes/sb-1/files",
            None,
            404,
            "sandbox_not_found",
        ),
        (
            "GET",
            "/v1/workspaces/none",
            None,
            404,
            "workspace_not_found",
        ),
        (
            "POST",
            "/v1/workspaces/none/suspend",
            None,
            404,
            "workspace_not_found",
        ),
        (
            "POST",
            "/v1/workspaces",
            Some(json!({"name": "w", "snapshot_tag": "none"})),
            404,
            "snapshot_not_found",
        ),
    ];
    for (method, path, body, status, code) in cases {
        let (found, answer) = daemon.call(method, path, body.clone()).await;
        assert_eq!(
            (found, &answer["code"]),
            (status, &json!(code)),
            "{method} {path} {body:?}: {answer}"
        );
        assert!(
            answer["error"]
                .as_str()
                .is_some_and(|text| !text.is_empty()),
            "{answer}"
        );
        assert!(answer["request_id"].is_string(), "{answer}");
    }
}

#[tokio::test]
async fn bodies_that_are_no_json_are_refused_as_json() {
    let daemon = Daemon::new(None);
    let post = |kind: Option<&str>, body: Vec<u8>| {
        let mut request = Request::post("/v1/sandboxes");
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        request.body(Body::from(body)).unwrap()
    };
    let cases = [
        (
            post(Some("text/plain"), b"{}".to_vec()),
            415,
            "unsupported_media_type",
        ),
        (post(None, b"{}".to_vec()), 415, "unsupported_media_type"),
        (
            post(Some("application/json"), b"{".to_vec()),
            400,
            "invalid_request",
        ),
        (
            post(Some("application/json"), vec![b' '; 3 << 20]),
            413,
            "too_large",
        ),
        (post(None, Vec::new()), 422, "invalid_request"),
    ];
    for (request, status, code) in cases {
        let (found, body) = answer(daemon.send(request).await).await;
        assert_eq!((found, &body["code"]), (status, &json!(code)), "{body}");
    }
}

#[tokio::test]
async fn a_token_opens_everything_and_health_needs_none() {
    let daemon = Daemon::new(Some("alice=correct-horse-battery"));
    let get = |path: &str, header: Option<&str>| {
        let mut request = Request::get(path);
        if let Some(header) = header {
            request = request.header("authorization", header);
        }
        request.body(Body::empty()).unwrap()
    };
    for (header, code) in [
        (None, "missing_token"),
        (Some("Basic x"), "missing_token"),
        (Some("Bearer wrong"), "invalid_token"),
    ] {
        for path in ["/v1/snapshots", "/version", "/metrics", "/nowhere"] {
            let (status, body) = answer(daemon.send(get(path, header)).await).await;
            assert_eq!((status, &body["code"]), (401, &json!(code)), "{path}");
        }
    }
    let (status, _) = answer(
        daemon
            .send(get("/version", Some("Bearer correct-horse-battery")))
            .await,
    )
    .await;
    assert_eq!(status, 200);
    let health = daemon.send(get("/healthz/", None)).await;
    // There is no forkd-spawn here, and it says so; but it answers without a token.
    assert_eq!(health.status(), StatusCode::SERVICE_UNAVAILABLE);
    let text = std::fs::read_to_string(daemon.edge.audit_log.as_ref().unwrap()).unwrap();
    // Ten refusals of one address are written, two are counted.
    assert_eq!(forkd_edge::audit::verify(&text), Ok(11));
    assert!(text.contains("\"actor\":\"alice\"") && !text.contains("correct-horse"));
}

#[tokio::test]
async fn a_request_is_known_by_its_id_and_405_says_what_is_allowed() {
    let daemon = Daemon::new(None);
    let request = Request::put("/v1/sandboxes")
        .header("x-request-id", "mine-1")
        .body(Body::empty())
        .unwrap();
    let response = daemon.send(request).await;
    assert_eq!(response.headers()["x-request-id"], "mine-1");
    let allow = response.headers()["allow"].to_str().unwrap().to_owned();
    assert!(allow.contains("GET") && allow.contains("POST"), "{allow}");
    assert_eq!(answer(response).await.1["request_id"], "mine-1");
}

#[tokio::test]
async fn everything_works_over_tls_the_terminals_too() {
    let daemon = Daemon::new(Some("correct-horse-battery"));
    let data = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../front/rest-client/tests/data"
    );
    let files = TlsFiles {
        cert: format!("{data}/localhost.pem").into(),
        key: format!("{data}/localhost.key").into(),
    };
    let tls = Arc::new(RwLock::new(listen::load_tls(&files).unwrap()));
    let any = ListenAddr::Tcp("127.0.0.1:0".parse().unwrap());
    let bound = listen::bind(&any).await.unwrap();
    let Bound::Tcp(listener) = &bound else {
        panic!("{bound:?}");
    };
    let target = format!("https://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let server = Server::new(daemon.router(), Some(tls), Limits::default(), stop.clone());
    let accepting = tokio::spawn(server.accept(bound));

    let pem = std::fs::read(&files.cert).unwrap();
    let target = target.parse().unwrap();
    let token = Some("correct-horse-battery".to_owned());
    let client = Client::trusting(&target, token, &pem).unwrap();
    assert_eq!(client.snapshots().await.unwrap(), []);
    let start = serde_json::from_value(json!({"args": ["cat"]})).unwrap();
    let Err(refused) = client.terminal("sb-1", &start).await else {
        panic!("a terminal of no sandbox");
    };
    assert_eq!(
        refused.code(),
        Some(ErrorCode::SandboxNotFound),
        "{refused}"
    );
    let stranger = Client::trusting(&target, None, &pem).unwrap();
    let Err(refused) = stranger.terminal("sb-1", &start).await else {
        panic!("a terminal without a token");
    };
    assert_eq!(refused.code(), Some(ErrorCode::MissingToken), "{refused}");
    stop.cancel();
    accepting.await.unwrap();
}

#[tokio::test]
async fn the_names_of_the_metrics_are_kept() {
    forkd_edge::metrics::install();
    let daemon = Daemon::new(None);
    let response = daemon
        .send(Request::get("/metrics").body(Body::empty()).unwrap())
        .await;
    assert_eq!(
        response.headers()["content-type"],
        "text/plain; version=0.0.4"
    );
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20)
        .await
        .unwrap();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    for name in [
        "forkd_snapshots_total 0",
        "forkd_sandboxes_active 0",
        "forkd_branches_in_flight 0",
        "forkd_branch_concurrency_cap 4",
        "forkd_build_info{version=",
    ] {
        assert!(text.contains(name), "{name} is missing in {text}");
    }
}

#[test]
fn the_committed_document_is_what_the_code_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../openapi/v1.json");
    let committed = std::fs::read_to_string(path).unwrap();
    assert!(
        committed == openapi_text(),
        "openapi/v1.json is not what the code says; write it anew: forkd-controller openapi > openapi/v1.json"
    );
}

#[test]
fn every_route_of_the_contract_is_served_and_no_other() {
    let document = openapi();
    let mut served: Vec<&str> = document.paths.paths.keys().map(String::as_str).collect();
    // The document does not describe itself.
    served.push(routes::OPENAPI);
    served.sort_unstable();
    let mut named = routes::ALL.to_vec();
    named.sort_unstable();
    assert_eq!(served, named);
}

#[test]
fn every_operation_has_an_id_of_its_own() {
    let document = openapi();
    let mut seen = std::collections::BTreeSet::new();
    for (path, item) in &document.paths.paths {
        let operations = [&item.get, &item.put, &item.post, &item.delete, &item.patch];
        for operation in operations.into_iter().flatten() {
            let id = operation.operation_id.clone().unwrap_or_default();
            assert!(!id.is_empty(), "{path} has no operation ID");
            assert!(seen.insert(id.clone()), "{id} is the ID of two operations");
        }
    }
}
