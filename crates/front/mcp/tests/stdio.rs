//! The server on a pair of pipes, with a daemon of a few canned answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use forkd_mcp::{Options, Tools, stdio};
use forkd_rest_client::{Client, Inside};
use futures::{FutureExt, StreamExt, stream};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, ReadHalf, WriteHalf};

/// Set when the body of a command's output is dropped before its end.
type Dropped = Arc<AtomicBool>;

struct Guard(Dropped);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A daemon on which a command prints a line and never ends, and everything else is not found.
fn daemon(dropped: &Dropped) -> Client {
    let dropped = Arc::clone(dropped);
    let answer = move |request: http::Request<reqwest::Body>| {
        let guard = Guard(Arc::clone(&dropped));
        let path = request.uri().path().to_owned();
        async move {
            if path.ends_with("/exec/stream") {
                let line = r#"{"type":"stdout","text":"step one\n","offset":0}"#;
                let first = stream::iter([Ok(Bytes::from(format!("{line}\n")))]);
                let rest = stream::pending::<Result<Bytes, std::io::Error>>();
                let body = first.chain(rest).map(move |item| {
                    let _ = &guard;
                    item
                });
                return http::Response::new(reqwest::Body::wrap_stream(body));
            }
            std::mem::forget(guard);
            let body = json!({"error": "there is no sandbox x", "code": "sandbox_not_found", "hint": "list them"});
            let response = http::Response::builder().status(404);
            response.body(body.to_string().into()).unwrap()
        }
        .boxed()
    };
    let client = Client::new(&"http://localhost".parse().unwrap(), None).unwrap();
    client.inside(Inside::new(answer))
}

struct Peer {
    lines: tokio::io::Lines<BufReader<ReadHalf<DuplexStream>>>,
    out: WriteHalf<DuplexStream>,
}

impl Peer {
    async fn start(dropped: &Dropped) -> Self {
        let (near, far) = tokio::io::duplex(1 << 16);
        let (input, output) = tokio::io::split(far);
        let tools = Tools::new(daemon(dropped), Options::default());
        tokio::spawn(stdio::serve_on(tools, input, output));
        let (input, out) = tokio::io::split(near);
        let mut peer = Self {
            lines: BufReader::new(input).lines(),
            out,
        };
        let hello = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}});
        peer.send(json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}))
            .await;
        let answer = peer.next().await;
        assert_eq!(answer["result"]["serverInfo"]["name"], "forkd", "{answer}");
        assert_eq!(answer["result"]["protocolVersion"], "2025-06-18");
        // A request that the server answers belongs to a capability that it declares.
        for name in ["tools", "resources", "prompts", "completions"] {
            assert!(answer["result"]["capabilities"][name].is_object(), "{name}");
        }
        peer.send(json!({"jsonrpc": "2.0", "method": "notifications/initialized"}))
            .await;
        peer
    }

    async fn send(&mut self, message: Value) {
        let line = format!("{message}\n");
        self.out.write_all(line.as_bytes()).await.unwrap();
    }

    async fn next(&mut self) -> Value {
        let line = tokio::time::timeout(Duration::from_secs(60), self.lines.next_line()).await;
        serde_json::from_str(&line.unwrap().unwrap().unwrap()).unwrap()
    }

    async fn call(&mut self, tool: &str, arguments: Value, meta: Value) {
        let params = json!({"name": tool, "arguments": arguments, "_meta": meta});
        self.send(json!({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}))
            .await;
    }
}

#[tokio::test]
async fn tools_are_listed_and_refusals_carry_the_code_of_the_daemon() {
    let mut peer = Peer::start(&Dropped::default()).await;
    peer.send(json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}))
        .await;
    let answer = peer.next().await;
    let tools = answer["result"]["tools"].as_array().unwrap();
    assert_eq!(tools.len(), 21);
    let find = |name: &str| tools.iter().find(|tool| tool["name"] == name).unwrap();
    assert_eq!(find("read_file")["annotations"]["readOnlyHint"], true);
    assert_eq!(find("kill_sandbox")["annotations"]["destructiveHint"], true);
    peer.call("get_sandbox", json!({"sandbox_id": "x"}), json!({}))
        .await;
    let answer = peer.next().await;
    assert_eq!(answer["result"]["isError"], true, "{answer}");
    let refusal = &answer["result"]["structuredContent"];
    let wanted =
        json!({"error": "there is no sandbox x", "code": "sandbox_not_found", "hint": "list them"});
    assert_eq!(refusal, &wanted);
}

#[tokio::test]
async fn prompts_are_listed_and_filled_in() {
    let mut peer = Peer::start(&Dropped::default()).await;
    let list = json!({"jsonrpc": "2.0", "id": 1, "method": "prompts/list"});
    peer.send(list).await;
    let answer = peer.next().await;
    let prompts = answer["result"]["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 3, "{answer}");
    let get = |name: &str| {
        let params = json!({"name": name, "arguments": {"task": "count to ten"}});
        json!({"jsonrpc": "2.0", "id": 2, "method": "prompts/get", "params": params})
    };
    peer.send(get("try_in_sandbox")).await;
    let answer = peer.next().await;
    let text = &answer["result"]["messages"][0]["content"]["text"];
    assert!(text.as_str().unwrap().contains("count to ten"), "{answer}");
    peer.send(get("another")).await;
    let answer = peer.next().await;
    assert_eq!(answer["error"]["code"], -32602, "{answer}");
}

#[tokio::test]
async fn progress_is_reported_and_a_cancelled_call_lets_go_of_its_command() {
    let dropped = Dropped::default();
    let mut peer = Peer::start(&dropped).await;
    let arguments = json!({"sandbox_id": "x", "args": ["sleep", "1000"], "timeout_secs": 2000});
    peer.call("exec_command", arguments, json!({"progressToken": "p"}))
        .await;
    let note = peer.next().await;
    assert_eq!(note["method"], "notifications/progress", "{note}");
    assert_eq!(note["params"]["message"], "step one");
    assert!(!dropped.load(Ordering::SeqCst));
    let params = json!({"requestId": 7, "reason": "enough"});
    peer.send(json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}))
        .await;
    while !dropped.load(Ordering::SeqCst) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_client_that_disappears_lets_go_of_its_command() {
    let dropped = Dropped::default();
    let mut peer = Peer::start(&dropped).await;
    let arguments = json!({"sandbox_id": "x", "args": ["sleep", "1000"]});
    peer.call("exec_command", arguments, json!({"progressToken": 1}))
        .await;
    peer.next().await;
    drop(peer);
    while !dropped.load(Ordering::SeqCst) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn nonsense_does_not_end_the_server() {
    let mut peer = Peer::start(&Dropped::default()).await;
    for line in ["{", "[]", "\u{0}", r#"{"jsonrpc":"2.0","id":3}"#] {
        peer.out
            .write_all(format!("{line}\n").as_bytes())
            .await
            .unwrap();
    }
    let long = "x".repeat(5 << 20);
    peer.out
        .write_all(format!("{long}\n").as_bytes())
        .await
        .unwrap();
    peer.send(json!({"jsonrpc": "2.0", "id": 9, "method": "ping"}))
        .await;
    loop {
        let answer = peer.next().await;
        if answer["id"] == 9 {
            assert_eq!(answer["result"], json!({}), "{answer}");
            return;
        }
        assert!(answer["error"].is_object(), "{answer}");
    }
}
