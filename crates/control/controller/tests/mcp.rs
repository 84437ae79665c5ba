//! Tools over HTTP: they act for the sender of their request alone.

mod published;

use axum::body::Body;
use axum::http::Request;
use forkd_api::{CreateToken, Role};
use forkd_controller::serve::Front;
use forkd_edge::config::EdgeConfig;
use forkd_edge::listen::Peer;
use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;
use forkd_sandboxes::owners::Ownership;
use forkd_types::Tag;
use published::publish;
use serde_json::{Value, json};
use tower::ServiceExt;

const TAG: &str = "secret-snapshot";

struct Daemon {
    front: Front,
    _dir: tempfile::TempDir,
}

impl Daemon {
    /// A daemon with a snapshot of "a".
    async fn new(tools: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (app, _endings) = App::open(Config::below(dir.path())).unwrap();
        publish(&app, TAG, "sb-00000001-0000000000000001");
        let tag: Tag = TAG.parse().unwrap();
        let ownership = Ownership {
            owner: "a".into(),
            public: false,
        };
        app.owners.set(&tag, ownership).await.unwrap();
        let front = Front::open(&app, &EdgeConfig::closed()).unwrap();
        let front = front
            .with_mcp(tools.parse().unwrap(), app.stopping.clone())
            .unwrap();
        Self { front, _dir: dir }
    }

    async fn token(&self, name: &str, role: Role) -> String {
        // The first token is one of an administrator. It exists already at the second call.
        let root = CreateToken {
            name: "root".into(),
            owner: None,
            role: Role::Admin,
        };
        let _ = self.front.tokens.create(root).await;
        let request = CreateToken {
            name: name.into(),
            owner: None,
            role,
        };
        self.front.tokens.create(request).await.unwrap().token
    }

    /// A request over TCP, and the answer.
    async fn send(&self, method: &str, headers: &[(&str, &str)], body: String) -> (u16, String) {
        let mut request = Request::builder()
            .method(method)
            .uri("/mcp")
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .extension(Peer {
                remote: "127.0.0.1:5".into(),
                address: Some([127, 0, 0, 1].into()),
                trusted: None,
            });
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body)).unwrap();
        let response = self.front.router.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let bytes = axum::body::to_bytes(response.into_body(), 8 << 20).await;
        (status, String::from_utf8(bytes.unwrap().to_vec()).unwrap())
    }

    /// The result of a method, for the bearer of a token.
    async fn ask(&self, token: &str, method: &str, params: Value) -> Value {
        let message = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        let bearer = format!("Bearer {token}");
        let headers = [
            ("host", "localhost"),
            ("authorization", bearer.as_str()),
            ("mcp-protocol-version", "2025-11-25"),
        ];
        let (status, text) = self.send("POST", &headers, message.to_string()).await;
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}"))
    }

    async fn call(&self, token: &str, tool: &str, arguments: Value) -> Value {
        let params = json!({"name": tool, "arguments": arguments});
        let answer = self.ask(token, "tools/call", params).await;
        answer["result"].clone()
    }
}

#[tokio::test]
async fn a_tool_sees_what_the_bearer_of_the_token_may_see() {
    let daemon = Daemon::new("all").await;
    let a = daemon.token("a", Role::Use).await;
    let b = daemon.token("b", Role::Use).await;
    let mine = daemon.call(&a, "list_snapshots", json!({})).await;
    assert_eq!(mine["structuredContent"]["result"][0]["tag"], TAG, "{mine}");
    let others = daemon.call(&b, "list_snapshots", json!({})).await;
    assert_eq!(others["structuredContent"]["result"], json!([]), "{others}");
    for (tool, arguments) in [
        ("snapshot_info", json!({"tag": TAG})),
        ("delete_snapshot", json!({"tag": TAG})),
        ("spawn_sandboxes", json!({"snapshot_tag": TAG})),
    ] {
        let refused = daemon.call(&b, tool, arguments).await;
        assert_eq!(refused["isError"], true, "{tool}: {refused}");
        let code = &refused["structuredContent"]["code"];
        assert_eq!(code, "snapshot_not_found", "{tool}: {refused}");
    }
}

#[tokio::test]
async fn a_reader_can_read_and_nothing_else() {
    let daemon = Daemon::new("all").await;
    let reader = daemon.token("a", Role::Read).await;
    let read = daemon.call(&reader, "list_snapshots", json!({})).await;
    assert_eq!(read["isError"], false, "{read}");
    let refused = daemon
        .call(&reader, "delete_snapshot", json!({"tag": TAG}))
        .await;
    assert_eq!(refused["structuredContent"]["code"], "forbidden");
}

#[tokio::test]
async fn requests_without_a_token_or_from_a_web_page_are_refused() {
    let daemon = Daemon::new("core").await;
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}).to_string();
    let from = |headers: &'static [(&str, &str)]| daemon.send("POST", headers, list.clone());
    assert_eq!(from(&[("host", "localhost")]).await.0, 200);
    assert_eq!(from(&[("host", "evil.example")]).await.0, 403);
    let page = [("host", "localhost"), ("origin", "https://evil.example")];
    assert_eq!(daemon.send("POST", &page, list.clone()).await.0, 403);
    daemon.token("a", Role::Use).await;
    assert_eq!(from(&[("host", "localhost")]).await.0, 401);
    assert_eq!(
        from(&[("host", "localhost"), ("authorization", "Bearer no")])
            .await
            .0,
        401
    );
}

#[tokio::test]
async fn bad_messages_are_refused() {
    let daemon = Daemon::new("core").await;
    let local = [("host", "localhost")];
    for body in ["", "{", "[]", "null", r#"{"jsonrpc": "1.0"}"#] {
        let (status, text) = daemon.send("POST", &local, body.to_owned()).await;
        assert!((400..500).contains(&status), "{body}: {status} {text}");
    }
    let long = format!(r#"{{"a": "{}"}}"#, "x".repeat(5 << 20));
    assert_eq!(daemon.send("POST", &local, long).await.0, 413);
    for method in ["GET", "DELETE", "PUT"] {
        assert_eq!(daemon.send(method, &local, String::new()).await.0, 405);
    }
    let answer = daemon.ask("", "tools/call", json!({"name": "rm"})).await;
    assert_eq!(answer["error"]["code"], -32602, "{answer}");
    // A tool of a larger set does not exist in a smaller one.
    let params = json!({"name": "explore", "arguments": {}});
    let answer = daemon.ask("", "tools/call", params).await;
    assert_eq!(answer["error"]["code"], -32602, "{answer}");
    let refused = daemon
        .call("", "exec_command", json!({"sandbox_id": 1}))
        .await;
    assert_eq!(refused["structuredContent"]["code"], "invalid_request");
}

#[tokio::test]
async fn the_route_does_not_exist_unless_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (app, _endings) = App::open(Config::below(dir.path())).unwrap();
    let front = Front::open(&app, &EdgeConfig::closed()).unwrap();
    let request = Request::post("/mcp")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(Body::from("{}"))
        .unwrap();
    let response = front.router.oneshot(request).await.unwrap();
    assert_eq!(response.status(), 404);
}
