//! The E2B plane keeps owners apart: every route of its control API, and the
//! data routes without a token.

mod published;

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use forkd_api::{CreateToken, Role};
use forkd_controller::serve::Front;
use forkd_edge::config::EdgeConfig;
use forkd_planes::e2b::{CONTROL_ROUTES, E2bConfig};
use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;
use forkd_sandboxes::owners::Ownership;
use forkd_sandboxes::state::{OnExpiry, RECORD_VERSION, SuspendedSandbox, WorkspaceRecord};
use published::publish;
use serde_json::Value;
use tower::ServiceExt;

const ID: &str = "sb00000001000000000000000001";
const SNAPSHOT: &str = "secret-snapshot";

/// The finding of the other owner.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Finds {
    /// That it does not exist.
    Nothing,
    /// An answer without it.
    Others,
}

use Finds::{Nothing, Others};

/// Every route, and a request to it for something of another owner.
const TABLE: &[(&str, &str, &str, Finds)] = &[
    ("GET", "/sandboxes", "", Others),
    (
        "POST",
        "/sandboxes",
        r#"{"templateID":"secret-snapshot"}"#,
        Nothing,
    ),
    ("GET", "/v2/sandboxes", "", Others),
    (
        "POST",
        "/v2/sandboxes",
        r#"{"templateID":"secret-snapshot"}"#,
        Nothing,
    ),
    ("GET", "/sandboxes/metrics", "", Others),
    ("GET", "/sandboxes/{id}", "", Nothing),
    (
        "POST",
        "/sandboxes/{id}/timeout",
        r#"{"timeout":1}"#,
        Nothing,
    ),
    ("POST", "/sandboxes/{id}/refreshes", "{}", Nothing),
    ("POST", "/sandboxes/{id}/pause", "{}", Nothing),
    ("POST", "/sandboxes/{id}/resume", "{}", Nothing),
    ("POST", "/sandboxes/{id}/connect", "{}", Nothing),
    ("POST", "/v2/sandboxes/{id}/connect", "{}", Nothing),
    ("GET", "/sandboxes/{id}/metrics", "", Nothing),
    ("GET", "/sandboxes/{id}/logs", "", Nothing),
    ("GET", "/v2/sandboxes/{id}/logs", "", Nothing),
    ("POST", "/sandboxes/{id}/snapshots", "{}", Nothing),
    ("POST", "/sandboxes/{id}/fork", "{}", Nothing),
    ("PUT", "/sandboxes/{id}/network", "{}", Nothing),
    ("GET", "/snapshots", "", Others),
    ("GET", "/templates", "", Others),
    ("GET", "/v2/templates", "", Others),
    ("GET", "/templates/aliases/{alias}", "", Nothing),
    ("GET", "/templates/{id}", "", Nothing),
    ("DELETE", "/templates/{id}", "", Nothing),
    ("DELETE", "/sandboxes/{id}", "", Nothing),
];

struct Daemon {
    front: Front,
    _app: Arc<App>,
    _dir: tempfile::TempDir,
}

impl Daemon {
    /// A daemon with a paused sandbox and a snapshot of "a".
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("token");
        std::fs::write(&token, "root=correct-horse-battery").unwrap();
        let edge = EdgeConfig {
            token_file: Some(token),
            ..EdgeConfig::closed()
        };
        let (app, _endings) = App::open(Config::below(dir.path())).unwrap();
        let config = E2bConfig::new(None, &[format!("base={SNAPSHOT}")]).unwrap();
        let front = Front::with_e2b(&app, &edge, Some(config), Default::default()).unwrap();
        publish(&app, SNAPSHOT, ID);
        let ownership = Ownership {
            owner: "a".into(),
            public: false,
        };
        let tag = SNAPSHOT.parse().unwrap();
        app.owners.set(&tag, ownership).await.unwrap();
        let kept = SuspendedSandbox {
            on_expiry: OnExpiry::Suspend,
            limits: Default::default(),
            labels: Default::default(),
            env: Default::default(),
            metadata: [("secret".to_owned(), "value".to_owned())].into(),
            memory_mib: 1,
            vcpus: 1,
            disk_bytes: 0,
            ports: Default::default(),
        };
        let paused = WorkspaceRecord {
            network: None,
            version: RECORD_VERSION,
            name: ID.parse().unwrap(),
            id: "ws-1".into(),
            owner: "a".into(),
            source: tag.clone(),
            state_tag: Some(tag),
            sandbox: Some(ID.parse().unwrap()),
            suspended: true,
            created_at_unix: 1,
            last_active_unix: 1,
            per_child_netns: false,
            memory_limit_mib: None,
            last_branch_memory_path: None,
            of_sandbox: Some(Box::new(kept)),
        };
        app.db.put_workspace(paused).await.unwrap();
        Self {
            front,
            _app: app,
            _dir: dir,
        }
    }

    async fn token(&self, owner: &str, role: Role) -> String {
        let request = CreateToken {
            name: owner.into(),
            owner: Some(owner.into()),
            role,
        };
        self.front.tokens.create(request).await.unwrap().token
    }

    async fn send(&self, request: Request<Body>) -> (u16, String) {
        let answer = self.front.router.clone().oneshot(request).await.unwrap();
        let status = answer.status().as_u16();
        let bytes = axum::body::to_bytes(answer.into_body(), 1 << 20).await;
        (status, String::from_utf8(bytes.unwrap().to_vec()).unwrap())
    }

    async fn control(&self, key: &str, method: &str, route: &str, body: &str) -> (u16, String) {
        let path = route
            .replace("/templates/{id}", &format!("/templates/{SNAPSHOT}"))
            .replace("{id}", ID)
            .replace("{alias}", SNAPSHOT);
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("x-api-key", key);
        if !body.is_empty() {
            request = request.header("content-type", "application/json");
        }
        self.send(request.body(Body::from(body.to_owned())).unwrap())
            .await
    }

    async fn data(&self, port: &str, method: &str, path: &str) -> (u16, String) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("e2b-sandbox-id", ID)
            .header("e2b-sandbox-port", port)
            .header("content-type", "application/json")
            .body(Body::from("{}"))
            .unwrap();
        self.send(request).await
    }
}

/// The number in an error body, which the SDKs decide by.
fn code(text: &str) -> u64 {
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    body["code"].as_u64().unwrap_or_default()
}

#[test]
fn the_table_has_every_route() {
    let listed: BTreeSet<_> = TABLE
        .iter()
        .map(|(method, route, ..)| (*method, *route))
        .collect();
    assert_eq!(listed, CONTROL_ROUTES.iter().copied().collect());
    assert_eq!(listed.len(), TABLE.len());
}

#[tokio::test]
async fn another_owner_finds_nothing() {
    let daemon = Daemon::new().await;
    let (mine, theirs) = (
        daemon.token("a", Role::Use).await,
        daemon.token("b", Role::Use).await,
    );
    for (method, route, body, finds) in TABLE {
        let (status, text) = daemon.control(&theirs, method, route, body).await;
        let case = format!("{method} {route}: {status} {text}");
        match finds {
            Nothing => assert_eq!((status, code(&text)), (404, 404), "{case}"),
            Others => assert_eq!(status, 200, "{case}"),
        }
        assert!(!text.contains("secret\":\"value"), "{case}");
        assert!(*finds == Nothing || !text.contains(ID), "{case}");
        assert!(*finds == Nothing || !text.contains(SNAPSHOT), "{case}");
    }
    // The owner finds all of it, also after the other one has tried to delete it.
    let (status, text) = daemon.control(&mine, "GET", "/sandboxes/{id}", "").await;
    assert_eq!(status, 200, "{text}");
    let detail: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(detail["state"], "paused");
    assert_eq!(detail["metadata"]["secret"], "value");
    for route in ["/v2/sandboxes", "/snapshots", "/templates"] {
        let (_, text) = daemon.control(&mine, "GET", route, "").await;
        assert!(
            text.contains(ID) || text.contains(SNAPSHOT),
            "{route}: {text}"
        );
    }
    let (status, _) = daemon
        .control(&mine, "GET", "/templates/aliases/base", "")
        .await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn a_key_is_needed_and_a_reader_changes_nothing() {
    let daemon = Daemon::new().await;
    let reader = daemon.token("a", Role::Read).await;
    for (method, route, body, _) in TABLE {
        for key in ["", "e2b_0000"] {
            let (status, text) = daemon.control(key, method, route, body).await;
            assert_eq!(
                (status, code(&text)),
                (401, 401),
                "{method} {route}: {text}"
            );
        }
        if *method != "GET" {
            let (status, text) = daemon.control(&reader, method, route, body).await;
            assert_eq!(
                (status, code(&text)),
                (403, 403),
                "{method} {route}: {text}"
            );
        }
    }
}

#[tokio::test]
async fn a_sandbox_that_does_not_run_answers_as_the_sdks_expect() {
    let daemon = Daemon::new().await;
    for (port, method, path) in [
        ("49983", "GET", "/health"),
        ("49983", "GET", "/files?path=x"),
        ("49983", "POST", "/process.Process/List"),
        ("49983", "POST", "/filesystem.Filesystem/Stat"),
        ("49999", "POST", "/execute"),
        ("49999", "GET", "/contexts"),
        ("8000", "GET", "/anything"),
    ] {
        let (status, text) = daemon.data(port, method, path).await;
        assert_eq!((status, code(&text)), (502, 502), "{path}: {text}");
        assert!(text.contains("was not found"), "{path}: {text}");
    }
}
