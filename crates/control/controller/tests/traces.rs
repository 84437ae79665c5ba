//! The daemon as a process, and a collector that takes its traces.

mod stand_in;
mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::{Span, status::StatusCode};
use prost::Message;
use support::Daemon;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

/// Takes what is posted to it.
struct Collector {
    url: String,
    taken: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let taken = Arc::new(Mutex::new(Vec::new()));
        let store = Arc::clone(&taken);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let batch = take(stream.unwrap());
                store.lock().unwrap().push(batch);
            }
        });
        Self { url, taken }
    }

    fn spans(&self) -> Vec<Span> {
        self.taken
            .lock()
            .unwrap()
            .iter()
            .flat_map(|batch| &batch.resource_spans)
            .flat_map(|resource| &resource.scope_spans)
            .flat_map(|scope| scope.spans.clone())
            .collect()
    }
}

fn take(stream: TcpStream) -> ExportTraceServiceRequest {
    let mut stream = BufReader::new(stream);
    let mut length = 0;
    let mut first = String::new();
    stream.read_line(&mut first).unwrap();
    assert!(first.starts_with("POST /v1/traces "), "{first}");
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        match line.trim().to_ascii_lowercase().split_once(": ") {
            Some(("content-length", value)) => length = value.parse().unwrap(),
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    stream.get_mut().write_all(answer).unwrap();
    ExportTraceServiceRequest::decode(body.as_slice()).unwrap()
}

/// A daemon that sends its traces there, and the socket it listens on.
fn daemon(root: &Path, endpoint: &str) -> (Daemon, PathBuf) {
    let socket = root.join("forkd.sock");
    let args = [
        "--otlp-endpoint",
        endpoint,
        "--otlp-service-name",
        "forkd-test",
        "--socket",
        socket.to_str().unwrap(),
        "--image-program",
        "/nonexistent",
    ];
    (Daemon::start(root, &args), socket)
}

/// The status of an answer.
fn call(socket: &Path, head: &str, body: &str) -> u16 {
    let mut stream = UnixStream::connect(socket).unwrap();
    write!(
        stream,
        "{head}\r\nhost: forkd\r\nconnection: close\r\ntraceparent: 00-{TRACE}-{CALLER}-01\r\n\
         authorization: Bearer hunter2\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

fn attribute(span: &Span, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|found| found.key == key)?;
    match found.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text.clone()),
        Value::IntValue(number) => Some(number.to_string()),
        other => panic!("{key} is {other:?}"),
    }
}

#[test]
fn requests_arrive_as_spans_of_the_callers_trace() {
    let dir = tempfile::tempdir().unwrap();
    let collector = Collector::start();
    let (daemon, socket) = daemon(dir.path(), &collector.url);
    let get = "GET /v1/sandboxes/sb-1?token=hunter2 HTTP/1.1\r\nx-request-id: mine-1";
    assert_eq!(call(&socket, get, ""), 404);
    assert_eq!(call(&socket, "GET /healthz HTTP/1.1", ""), 503);
    assert_eq!(call(&socket, "GET /hunter2 HTTP/1.1", ""), 404);
    let build = r#"{"tag": "t", "image": "none"}"#;
    assert_eq!(call(&socket, "POST /v1/snapshots HTTP/1.1", build), 404);
    let (status, said) = daemon.stop();
    assert!(status.success(), "{said}");

    let spans = collector.spans();
    let named = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    let found = named("GET /v1/sandboxes/{id}");
    assert_eq!(hex::encode(&found.trace_id), TRACE);
    assert_eq!(hex::encode(&found.parent_span_id), CALLER);
    for (key, value) in [
        ("http.request.method", "GET"),
        ("http.route", "/v1/sandboxes/{id}"),
        ("http.response.status_code", "404"),
        ("forkd.request_id", "mine-1"),
    ] {
        assert_eq!(attribute(found, key).as_deref(), Some(value));
    }
    let status = named("GET /healthz").status.as_ref().unwrap();
    assert_eq!(status.code(), StatusCode::Error);
    assert_eq!(attribute(named("GET"), "http.route"), None);
    let build = named("build");
    assert_eq!(build.parent_span_id, named("POST /v1/snapshots").span_id);
    assert_eq!(attribute(build, "forkd.snapshot").as_deref(), Some("t"));

    let all = format!("{:?}", collector.taken.lock().unwrap());
    assert!(all.contains("forkd-test"), "{all}");
    assert!(!all.contains("hunter2"), "{all}");
    assert!(!said.contains("forkd_trace"), "{said}");
}

#[test]
fn a_collector_that_is_gone_is_mentioned_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    let (daemon, socket) = daemon(dir.path(), &url);
    assert_eq!(call(&socket, "GET /version HTTP/1.1", ""), 200);
    let (status, said) = daemon.stop();
    assert!(status.success(), "{said}");
    assert!(said.contains("traces cannot be sent"), "{said}");
}
