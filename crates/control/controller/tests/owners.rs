//! Every route of the API, used by one owner on objects of another.

mod published;

use std::sync::Arc;

use axum::body::Body;
use axum::http::Request;
use forkd_api::{CreateToken, ErrorCode, EventKind, Role};
use forkd_controller::serve::Front;
use forkd_edge::config::EdgeConfig;
use forkd_planes::rest::openapi;
use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;
use forkd_sandboxes::ops::secrets;
use forkd_sandboxes::owners::Ownership;
use forkd_sandboxes::sandbox::birth::Birth;
use forkd_sandboxes::sandbox::{SandboxHandle, owner};
use forkd_sandboxes::state::{RECORD_VERSION, SandboxRecord, WorkspaceRecord};
use forkd_types::{SecretValue, Tag};
use futures::StreamExt;
use published::publish;
use serde_json::{Value, json};
use tower::ServiceExt;

const ID: &str = "sb-00000001-0000000000000001";
const SNAPSHOT: &str = "secret-snapshot";
const SPACE: &str = "secret-space";
const SHARED: &str = "shared-snapshot";

/// The answer to an owner who asks for an object of another owner.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Finds {
    /// That it does not exist.
    Nothing(ErrorCode),
    /// An answer without it.
    Others,
    /// That the name is taken: names of snapshots and workspaces are the same for all owners.
    Taken,
    /// That an administrator is needed.
    Forbidden,
    /// A stream; another test reads it.
    Stream,
}

use Finds::{Forbidden, Nothing, Others, Stream, Taken};

const NO_SANDBOX: Finds = Nothing(ErrorCode::SandboxNotFound);
const NO_SNAPSHOT: Finds = Nothing(ErrorCode::SnapshotNotFound);
const NO_IMAGE: Finds = Nothing(ErrorCode::ImageNotFound);
const NO_OPERATION: Finds = Nothing(ErrorCode::OperationNotFound);
const NO_SECRET: Finds = Nothing(ErrorCode::SecretNotFound);
const NO_SPACE: Finds = Nothing(ErrorCode::WorkspaceNotFound);

/// Every route, a request to it for something of another owner, and what comes of it. Deletions are last.
const TABLE: &[(&str, &str, &str, Finds)] = &[
    ("GET", "/healthz", "", Others),
    ("GET", "/version", "", Others),
    ("GET", "/metrics", "", Others),
    ("GET", "/v1/images", "", Others),
    ("POST", "/v1/images", r#"{"from": "app:1"}"#, Others),
    ("POST", "/v1/images/archive", "", Others),
    ("POST", "/v1/images/prune", "", Others),
    ("POST", "/v1/builds", "", Others),
    ("GET", "/v1/images/{name}/archive", "", NO_IMAGE),
    ("GET", "/v1/images/{name}", "", NO_IMAGE),
    ("DELETE", "/v1/images/{name}", "", NO_IMAGE),
    ("GET", "/v1/operations", "", Others),
    ("GET", "/v1/operations/{operation}", "", NO_OPERATION),
    ("DELETE", "/v1/operations/{operation}", "", NO_OPERATION),
    ("GET", "/v1/store", "", Others),
    ("POST", "/v1/store/fsck", "", Forbidden),
    ("GET", "/v1/tokens", "", Forbidden),
    (
        "POST",
        "/v1/tokens",
        r#"{"name": "more", "role": "admin"}"#,
        Forbidden,
    ),
    ("DELETE", "/v1/tokens/{name}", "", Forbidden),
    ("GET", "/v1/secrets", "", Others),
    ("DELETE", "/v1/secrets/{name}", "", NO_SECRET),
    (
        "PUT",
        "/v1/secrets/{name}",
        r#"{"value": "value-of-b"}"#,
        Others,
    ),
    ("GET", "/v1/events", "", Stream),
    ("GET", "/v1/snapshots", "", Others),
    (
        "POST",
        "/v1/snapshots",
        r#"{"tag": "secret-snapshot", "image": "x"}"#,
        Taken,
    ),
    (
        "PATCH",
        "/v1/snapshots/{tag}",
        r#"{"public": true}"#,
        NO_SNAPSHOT,
    ),
    ("GET", "/v1/snapshots/{tag}/info", "", NO_SNAPSHOT),
    (
        "POST",
        "/v1/snapshots/{tag}/compact",
        r#"{"to": "mine"}"#,
        NO_SNAPSHOT,
    ),
    ("POST", "/v1/snapshots/{tag}/pack", "", NO_SNAPSHOT),
    ("POST", "/v1/hub/check", "", Others),
    ("POST", "/v1/hub/unpack", "", Others),
    ("GET", "/v1/stats", "", Others),
    ("GET", "/v1/status", "", Others),
    ("GET", "/v1/node", "", Others),
    ("PATCH", "/v1/node", "{}", Forbidden),
    ("GET", "/v1/sandboxes", "", Others),
    (
        "POST",
        "/v1/sandboxes",
        r#"{"snapshot_tag": "secret-snapshot"}"#,
        NO_SNAPSHOT,
    ),
    ("GET", "/v1/sandboxes/{id}", "", NO_SANDBOX),
    (
        "PATCH",
        "/v1/sandboxes/{id}",
        r#"{"timeout_secs": 1}"#,
        NO_SANDBOX,
    ),
    ("POST", "/v1/sandboxes/{id}/ping", "", NO_SANDBOX),
    (
        "GET",
        "/v1/sandboxes/{id}/files/stat?path=/x",
        "",
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/files/rename",
        r#"{"from": "/x", "to": "/y"}"#,
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/files/attributes",
        r#"{"path": "/x"}"#,
        NO_SANDBOX,
    ),
    (
        "GET",
        "/v1/sandboxes/{id}/files/archive?path=/x",
        "",
        NO_SANDBOX,
    ),
    (
        "PUT",
        "/v1/sandboxes/{id}/files/archive?path=/x",
        "",
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/processes/{pid}/stdin",
        "",
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/processes/{pid}/resize",
        r#"{"rows": 1, "cols": 1}"#,
        NO_SANDBOX,
    ),
    ("GET", "/v1/sandboxes/{id}/ports", "", NO_SANDBOX),
    ("GET", "/v1/sandboxes/{id}/ports/{port}", "", NO_SANDBOX),
    (
        "PUT",
        "/v1/sandboxes/{id}/ports/{port}",
        r#"{"access": "public"}"#,
        NO_SANDBOX,
    ),
    ("DELETE", "/v1/sandboxes/{id}/ports/{port}", "", NO_SANDBOX),
    (
        "GET",
        "/v1/sandboxes/{id}/ports/{port}/connect",
        "",
        NO_SANDBOX,
    ),
    ("GET", "/v1/sandboxes/{id}/interpreters", "", NO_SANDBOX),
    (
        "POST",
        "/v1/sandboxes/{id}/interpreters",
        r#"{"language": "python"}"#,
        NO_SANDBOX,
    ),
    (
        "DELETE",
        "/v1/sandboxes/{id}/interpreters/{name}",
        "",
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/interpreters/{name}/restart",
        "",
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/interpreters/{name}/interrupt",
        "",
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/exec",
        r#"{"args": ["id"]}"#,
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/exec/stream",
        r#"{"args": ["id"]}"#,
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/eval",
        r#"{"code": "1"}"#,
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/branch",
        r#"{"tag": "mine"}"#,
        NO_SANDBOX,
    ),
    ("POST", "/v1/sandboxes/{id}/fork", r#"{"n": 1}"#, NO_SANDBOX),
    ("GET", "/v1/sandboxes/{id}/checkpoints", "", NO_SANDBOX),
    ("POST", "/v1/sandboxes/{id}/checkpoints", "{}", NO_SANDBOX),
    (
        "DELETE",
        "/v1/sandboxes/{id}/checkpoints/{name}",
        "",
        NO_SANDBOX,
    ),
    ("POST", "/v1/sandboxes/{id}/rollback", "{}", NO_SANDBOX),
    ("GET", "/v1/sandboxes/{id}/network", "", NO_SANDBOX),
    ("PUT", "/v1/sandboxes/{id}/network", r#""open""#, NO_SANDBOX),
    (
        "PATCH",
        "/v1/sandboxes/{id}/network",
        r#"{"add": ["allow private"]}"#,
        NO_SANDBOX,
    ),
    ("GET", "/v1/sandboxes/{id}/network/flows", "", NO_SANDBOX),
    ("GET", "/v1/sandboxes/{id}/network/log", "", NO_SANDBOX),
    ("POST", "/v1/sandboxes/{id}/network/reset", "", NO_SANDBOX),
    ("POST", "/v1/sandboxes/{id}/pause", "", NO_SANDBOX),
    ("POST", "/v1/sandboxes/{id}/resume", "", NO_SANDBOX),
    ("GET", "/v1/sandboxes/{id}/logs", "", NO_SANDBOX),
    (
        "GET",
        "/v1/sandboxes/{id}/files?path=/etc/passwd",
        "",
        NO_SANDBOX,
    ),
    (
        "PUT",
        "/v1/sandboxes/{id}/files?path=/etc/passwd",
        "",
        NO_SANDBOX,
    ),
    (
        "DELETE",
        "/v1/sandboxes/{id}/files?path=/etc/passwd",
        "",
        NO_SANDBOX,
    ),
    (
        "GET",
        "/v1/sandboxes/{id}/files/list?path=/",
        "",
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/files/mkdir",
        r#"{"path": "/x"}"#,
        NO_SANDBOX,
    ),
    (
        "GET",
        "/v1/sandboxes/{id}/files/watch?path=/",
        "",
        NO_SANDBOX,
    ),
    ("GET", "/v1/sandboxes/{id}/terminal", "", NO_SANDBOX),
    ("GET", "/v1/sandboxes/{id}/processes", "", NO_SANDBOX),
    (
        "POST",
        "/v1/sandboxes/{id}/processes",
        r#"{"args": ["id"]}"#,
        NO_SANDBOX,
    ),
    (
        "POST",
        "/v1/sandboxes/{id}/processes/{pid}/signal",
        r#"{"signal": 9}"#,
        NO_SANDBOX,
    ),
    (
        "GET",
        "/v1/sandboxes/{id}/processes/{pid}/output",
        "",
        NO_SANDBOX,
    ),
    ("GET", "/v1/workspaces", "", Others),
    (
        "POST",
        "/v1/workspaces",
        r#"{"name": "mine", "snapshot_tag": "secret-snapshot"}"#,
        NO_SNAPSHOT,
    ),
    ("GET", "/v1/workspaces/{name}", "", NO_SPACE),
    ("POST", "/v1/workspaces/{name}/suspend", "{}", NO_SPACE),
    ("POST", "/v1/workspaces/{name}/resume", "", NO_SPACE),
    ("DELETE", "/v1/workspaces/{name}", "", NO_SPACE),
    ("DELETE", "/v1/sandboxes/{id}", "", NO_SANDBOX),
    ("DELETE", "/v1/snapshots/{tag}", "", NO_SNAPSHOT),
];

struct Daemon {
    app: Arc<App>,
    front: Front,
    sandbox: Arc<SandboxHandle>,
    operation: String,
    _dir: tempfile::TempDir,
}

impl Daemon {
    /// A daemon with a sandbox, a snapshot and a workspace of "a", and a snapshot of "a" for everyone.
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let token = dir.path().join("token");
        std::fs::write(&token, "root=correct-horse-battery").unwrap();
        let edge = EdgeConfig {
            token_file: Some(token),
            ..EdgeConfig::closed()
        };
        let config = Config {
            max_sandboxes: 100,
            ..Config::below(dir.path())
        };
        let (app, _endings) = App::open(config).unwrap();
        let front = Front::open(&app, &edge).unwrap();
        let manifest = publish(&app, SNAPSHOT, ID);
        publish(&app, SHARED, ID);
        for (tag, public) in [(SNAPSHOT, false), (SHARED, true)] {
            let ownership = Ownership {
                owner: "a".into(),
                public,
            };
            let tag: Tag = tag.parse().unwrap();
            app.owners.set(&tag, ownership).await.unwrap();
        }
        let record: SandboxRecord = serde_json::from_value(json!({
            "id": ID, "state": "running", "tag": SNAPSHOT, "manifest": manifest.digest(), "pid": 1, "owner": "a",
            "created_at_unix": 1, "memory_mib": 1, "vcpus": 1, "cpu": manifest.cpu, "memory": manifest.memory,
            "disks": [], "source": manifest.source,
        }))
        .unwrap();
        let slot = app.limits.adopted("a");
        let birth = Birth::Lost("there is no VM".into());
        let sandbox = owner::start(&app, record, slot, birth);
        let space = WorkspaceRecord {
            version: RECORD_VERSION,
            name: SPACE.parse().unwrap(),
            id: "ws-1".into(),
            owner: "a".into(),
            source: SNAPSHOT.parse().unwrap(),
            state_tag: None,
            sandbox: Some(ID.parse().unwrap()),
            suspended: false,
            created_at_unix: 1,
            last_active_unix: 1,
            per_child_netns: false,
            memory_limit_mib: None,
            last_branch_memory_path: None,
            network: None,
            of_sandbox: None,
        };
        app.db.put_workspace(space).await.unwrap();
        private_image(&app);
        let value = SecretValue::new("value-of-a".into()).unwrap();
        secrets::set(&app, "a", SPACE.parse().unwrap(), value)
            .await
            .unwrap();
        let (operation, _) = app.operations.begin("a", "secret-image:1", None).unwrap();
        let operation = operation.info().id;
        Self {
            app,
            front,
            sandbox,
            operation,
            _dir: dir,
        }
    }

    async fn token(&self, name: &str, owner: &str, role: Role) -> String {
        let request = CreateToken {
            name: name.into(),
            owner: Some(owner.into()),
            role,
        };
        self.front.tokens.create(request).await.unwrap().token
    }

    async fn send(&self, token: &str, method: &str, route: &str, body: &str) -> (u16, String) {
        let path = route
            .replace("{id}", ID)
            .replace("{tag}", SNAPSHOT)
            .replace("{name}", if route.contains("tokens") { "a" } else { SPACE })
            .replace("{operation}", &self.operation)
            .replace("{port}", "80")
            .replace("{pid}", "7");
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("authorization", format!("Bearer {token}"));
        if !body.is_empty() {
            request = request.header("content-type", "application/json");
        }
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let response = self.front.router.clone().oneshot(request).await;
        let response = response.unwrap();
        let status = response.status().as_u16();
        let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await;
        let text = String::from_utf8_lossy(&bytes.unwrap()).into_owned();
        (status, text)
    }
}

/// An image that "a" fetched with a credential. It has the name of the workspace.
fn private_image(app: &App) {
    let folder = app.store.layout().images().join(SPACE);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("root.ext4"), "disk").unwrap();
    let origin = json!({
        "schema": 1, "asked": ["secret-image:1"], "owners": ["a"], "public": false, "created_at_unix": 1,
    });
    std::fs::write(folder.join("origin.json"), origin.to_string()).unwrap();
}

fn code(text: &str) -> Value {
    let body: Value = serde_json::from_str(text).unwrap_or_default();
    body["code"].clone()
}

#[test]
fn the_table_has_every_route() {
    let document = serde_json::to_value(openapi()).unwrap();
    let mut routes = Vec::new();
    for (path, operations) in document["paths"].as_object().unwrap() {
        for method in operations.as_object().unwrap().keys() {
            routes.push(format!("{} {path}", method.to_uppercase()));
        }
    }
    let mut listed: Vec<String> = TABLE
        .iter()
        .map(|(method, route, ..)| format!("{method} {}", route.split('?').next().unwrap()))
        .collect();
    routes.sort();
    listed.sort();
    assert_eq!(
        listed, routes,
        "a route is missing in the table, or in the API"
    );
}

#[tokio::test]
async fn nothing_of_another_owner_can_be_seen_used_or_changed() {
    let daemon = Daemon::new().await;
    let a = daemon.token("a", "a", Role::Use).await;
    let b = daemon.token("b", "b", Role::Use).await;
    for (method, route, body, finds) in TABLE {
        if *finds == Stream {
            continue;
        }
        let (status, text) = daemon.send(&b, method, route, body).await;
        let what = format!("{method} {route}: {status} {text}");
        match finds {
            Nothing(wanted) => {
                assert_eq!((status, code(&text)), (404, json!(wanted)), "{what}");
            }
            Forbidden => assert_eq!((status, code(&text)), (403, json!("forbidden")), "{what}"),
            Taken => assert_eq!(
                (status, code(&text)),
                (409, json!("already_exists")),
                "{what}"
            ),
            Others => {
                // The first two also say what is missing here; the others get no artifact and no context.
                let may_fail = [
                    "/healthz",
                    "/v1/status",
                    "/v1/hub/check",
                    "/v1/hub/unpack",
                    "/v1/builds",
                ]
                .contains(route);
                assert!(matches!(status, 200 | 202) || may_fail, "{what}");
                for name in [ID, SNAPSHOT, SPACE] {
                    // "b" has a secret of the same name now, which is another one.
                    let own = *route == "/v1/secrets/{name}";
                    assert!(own || !text.contains(name), "{what}");
                }
            }
            Stream => {}
        }
    }
    // Nothing was changed.
    assert!(!daemon.sandbox.stop.is_cancelled());
    let owned = daemon.app.owners.get(&SNAPSHOT.parse().unwrap()).unwrap();
    assert_eq!((owned.owner.as_str(), owned.public), ("a", false));
    assert!(daemon.app.store.contains(&SNAPSHOT.parse().unwrap()));
    assert_eq!(daemon.app.db.workspaces().await.unwrap().len(), 1);
    assert_eq!(daemon.front.tokens.list().await.unwrap().len(), 2);
    let secret = |owner: &str| daemon.app.db.secret(owner.into(), SPACE.parse().unwrap());
    let (of_a, of_b) = (secret("a").await.unwrap(), secret("b").await.unwrap());
    assert!(of_a.is_some() && of_b.is_some() && of_a != of_b);
    // The same requests of the owner find what they name.
    for (method, route, body, finds) in TABLE {
        let (Nothing(hidden), true) = (finds, *route != "/v1/sandboxes/{id}/terminal") else {
            continue;
        };
        if *method == "DELETE" && *route == "/v1/sandboxes/{id}" {
            // It went with its workspace.
            continue;
        }
        let (status, text) = daemon.send(&a, method, route, body).await;
        assert_ne!(
            code(&text),
            json!(hidden),
            "{method} {route}: {status} {text}"
        );
    }
}

#[tokio::test]
async fn a_reader_changes_nothing() {
    let daemon = Daemon::new().await;
    let reader = daemon.token("reader", "a", Role::Read).await;
    for (method, route, body, finds) in TABLE {
        if *finds == Stream {
            continue;
        }
        let (status, text) = daemon.send(&reader, method, route, body).await;
        let what = format!("{method} {route}: {status} {text}");
        let needs_more = matches!(
            *route,
            "/v1/sandboxes/{id}/terminal"
                | "/v1/sandboxes/{id}/ports/{port}/connect"
                | "/v1/tokens"
        );
        if *method == "GET" && !needs_more {
            assert_ne!(code(&text), "forbidden", "{what}");
        } else {
            assert_eq!((status, code(&text)), (403, json!("forbidden")), "{what}");
        }
    }
    assert!(!daemon.sandbox.stop.is_cancelled());
}

/// The proxy is outside of the document, and so of the table.
#[tokio::test]
async fn ports_are_reached_by_those_who_may_use_the_sandbox() {
    let daemon = Daemon::new().await;
    let reader = daemon.token("reader", "a", Role::Read).await;
    let other = daemon.token("other", "b", Role::Use).await;
    for route in [
        "/v1/sandboxes/{id}/proxy/80",
        "/v1/sandboxes/{id}/proxy/80/",
        "/v1/sandboxes/{id}/proxy/80/a/b",
    ] {
        for method in ["GET", "POST", "DELETE"] {
            let (status, text) = daemon.send(&other, method, route, "").await;
            let found = (status, code(&text));
            assert_eq!(
                found,
                (404, json!("sandbox_not_found")),
                "{method} {route}: {text}"
            );
            let (status, text) = daemon.send(&reader, method, route, "").await;
            let found = (status, code(&text));
            assert_eq!(found, (403, json!("forbidden")), "{method} {route}: {text}");
        }
    }
}

/// The plane of ports is outside of the document, and so of the table. Opening one port opens nothing else.
#[tokio::test]
async fn a_port_by_its_headers_is_for_its_owner_unless_it_is_opened() {
    let daemon = Daemon::new().await;
    let own = daemon.token("own", "a", Role::Use).await;
    let reader = daemon.token("reader", "a", Role::Read).await;
    let other = daemon.token("other", "b", Role::Use).await;
    let ask = async |token: Option<&str>, port: u16| {
        let mut request = Request::get("/x")
            .header("forkd-sandbox-id", ID)
            .header("forkd-sandbox-port", port);
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(Body::empty()).unwrap();
        let answer = daemon.front.router.clone().oneshot(request).await.unwrap();
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), 1 << 16).await;
        (status, code(&String::from_utf8_lossy(&body.unwrap())))
    };
    let route = "/v1/sandboxes/{id}/ports/{port}";
    for access in ["owner", "token"] {
        let body = format!(r#"{{"access": "{access}"}}"#);
        let (status, text) = daemon.send(&own, "PUT", route, &body).await;
        assert_eq!(status, 200, "{text}");
        assert_eq!(ask(None, 80).await, (401, json!("missing_token")));
        assert_eq!(
            ask(Some(&other), 80).await,
            (404, json!("sandbox_not_found"))
        );
        assert_eq!(ask(Some(&reader), 80).await, (403, json!("forbidden")));
    }
    daemon
        .send(&own, "PUT", route, r#"{"access": "public"}"#)
        .await;
    // It is let in, and there is no guest to answer.
    for token in [None, Some(other.as_str()), Some(&own)] {
        let (status, _) = ask(token, 80).await;
        assert!(![401, 403, 404].contains(&status), "{status}");
        assert_eq!(ask(None, 81).await, (401, json!("missing_token")));
    }
}

#[tokio::test]
async fn a_public_snapshot_can_be_used_by_everyone_and_changed_by_its_owner() {
    let daemon = Daemon::new().await;
    let a = daemon.token("a", "a", Role::Use).await;
    let b = daemon.token("b", "b", Role::Use).await;
    let shared = format!("/v1/snapshots/{SHARED}");
    let (status, text) = daemon.send(&b, "GET", "/v1/snapshots", "").await;
    assert!(status == 200 && text.contains(SHARED), "{text}");
    let (status, _) = daemon.send(&b, "GET", &format!("{shared}/info"), "").await;
    assert_eq!(status, 200);
    // It is found; there is no forkd-spawn to start a child with.
    let body = json!({"snapshot_tag": SHARED}).to_string();
    let (_, text) = daemon.send(&b, "POST", "/v1/sandboxes", &body).await;
    assert_ne!(code(&text), "snapshot_not_found", "{text}");
    for (method, body) in [("DELETE", ""), ("PATCH", r#"{"public": false}"#)] {
        let (status, text) = daemon.send(&b, method, &shared, body).await;
        assert_eq!((status, code(&text)), (403, json!("forbidden")), "{text}");
    }
    let (status, text) = daemon
        .send(&a, "PATCH", &shared, r#"{"public": false}"#)
        .await;
    assert_eq!(status, 200, "{text}");
    let (status, _) = daemon.send(&b, "GET", &format!("{shared}/info"), "").await;
    assert_eq!(status, 404);
}

#[tokio::test]
async fn events_go_to_the_owner_and_to_administrators() {
    let daemon = Daemon::new().await;
    let b = daemon.token("b", "b", Role::Read).await;
    let listen = async |token: &str| {
        let request = Request::get("/v1/events")
            .header("authorization", format!("Bearer {token}"))
            .body(Body::empty());
        let response = daemon.front.router.clone().oneshot(request.unwrap()).await;
        response.unwrap().into_body().into_data_stream()
    };
    let mut of_b = listen(&b).await;
    let mut of_root = listen("correct-horse-battery").await;
    let events = &daemon.app.events;
    events.tell(EventKind::SandboxBranched, ID, None);
    events.tell(EventKind::SnapshotReady, SNAPSHOT, None);
    let owner = Some("b".to_owned());
    events.tell_of(owner, EventKind::WorkspaceChanged, "of-b", None);
    let line = of_b.next().await.unwrap().unwrap();
    let event: Value = serde_json::from_slice(&line).unwrap();
    assert_eq!(
        (&event["object"], &event["owner"]),
        (&json!("of-b"), &json!("b"))
    );
    let line = of_root.next().await.unwrap().unwrap();
    let event: Value = serde_json::from_slice(&line).unwrap();
    assert_eq!(
        (&event["object"], &event["owner"]),
        (&json!(ID), &json!("a"))
    );
}

#[tokio::test]
async fn tokens_work_at_once_and_until_they_are_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config::below(dir.path());
    let (app, _endings) = App::open(config.clone()).unwrap();
    let front = Front::open(&app, &EdgeConfig::closed()).unwrap();
    let tokens = Arc::clone(&front.tokens);
    let status = async |front: &Front, token: Option<&str>| {
        let mut request = Request::get("/version");
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(Body::empty()).unwrap();
        let response = front.router.clone().oneshot(request).await;
        response.unwrap().status().as_u16()
    };
    let token = |name: &str, role| CreateToken {
        name: name.into(),
        owner: None,
        role,
    };
    assert_eq!(status(&front, None).await, 200);
    // After this token no user could make another one.
    assert!(tokens.create(token("u", Role::Use)).await.is_err());
    let root = tokens.create(token("root", Role::Admin)).await.unwrap();
    assert_eq!(status(&front, None).await, 401);
    assert_eq!(status(&front, Some(&root.token)).await, 200);
    let user = tokens.create(token("u", Role::Use)).await.unwrap();
    let again = tokens.create(token("u", Role::Use)).await.unwrap_err();
    assert_eq!(again.code(), ErrorCode::AlreadyExists);
    for name in ["anonymous", "token", "uid:0", "", "a b"] {
        assert!(
            tokens.create(token(name, Role::Use)).await.is_err(),
            "{name}"
        );
    }
    assert_eq!(status(&front, Some(&user.token)).await, 200);
    tokens.revoke("u").await.unwrap();
    assert_eq!(status(&front, Some(&user.token)).await, 401);
    assert_eq!(
        tokens.revoke("u").await.unwrap_err().code(),
        ErrorCode::TokenNotFound
    );
    assert_eq!(
        tokens.revoke("root").await.unwrap_err().code(),
        ErrorCode::WrongState
    );
    let stored = std::fs::read(&config.state_file).unwrap();
    let wal = std::fs::read(dir.path().join("state.db-wal")).unwrap_or_default();
    for bytes in [stored, wal] {
        assert!(
            !bytes
                .windows(root.token.len())
                .any(|part| part == root.token.as_bytes())
        );
    }
    // A daemon that is started again knows them.
    let again = dir.path().join("again");
    std::fs::create_dir(&again).unwrap();
    drop((front, tokens, app));
    let restarted = Config {
        state_file: config.state_file,
        ..Config::below(&again)
    };
    let (app, _endings) = App::open(restarted).unwrap();
    let front = Front::open(&app, &EdgeConfig::closed()).unwrap();
    assert_eq!(status(&front, None).await, 401);
    assert_eq!(status(&front, Some(&root.token)).await, 200);
}

#[tokio::test]
async fn a_private_image_can_be_used_and_removed_by_its_owner_only() {
    let daemon = Daemon::new().await;
    let a = daemon.token("a", "a", Role::Use).await;
    let b = daemon.token("b", "b", Role::Use).await;
    let body = json!({"tag": "mine", "image": SPACE}).to_string();
    let (status, text) = daemon.send(&b, "POST", "/v1/snapshots", &body).await;
    assert_eq!(
        (status, code(&text)),
        (404, json!("image_not_found")),
        "{text}"
    );
    let fetch = r#"{"from": "secret-image:1"}"#;
    let (_, text) = daemon.send(&b, "POST", "/v1/images", fetch).await;
    assert!(text.contains("running"), "{text}");
    let (status, text) = daemon.send(&a, "POST", "/v1/images", fetch).await;
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (status, &found["image"]["name"]),
        (202, &json!(SPACE)),
        "{text}"
    );
    let (status, text) = daemon.send(&a, "DELETE", "/v1/images/{name}", "").await;
    assert_eq!(status, 204, "{text}");
    assert!(!daemon.app.store.layout().images().join(SPACE).exists());
}
