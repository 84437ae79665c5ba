//! The host's side of the agent protocol, with a guest that says anything.

use forkd_agent_client::{Budget, Client, Deadline, Options};
use forkd_guest_proto::{
    DialRequest, EvalRequest, ExecRequest, Hello, Kind, ListRequest, WatchRequest, frame,
};
use std::time::Duration;
use tokio::io::AsyncWriteExt;

/// The memory that the answers of one input may take.
const BUDGET: usize = 4 << 20;
/// Longer than any input takes: a call that has to wait for its deadline is a finding.
const LIMIT: Duration = Duration::from_secs(60);

/// Every kind of call at once on a connection whose other end says hello, then the input, and closes. The calls have
/// the numbers 1 to 7, in the order below. All of them end, and all memory is given back.
pub(crate) fn client(data: &[u8]) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    let budget = Budget::of(BUDGET);
    let before = budget.free();
    runtime.block_on(talk(data, budget.clone()));
    drop(runtime);
    assert!(budget.free() == before, "an answer still holds memory");
}

async fn talk(data: &[u8], budget: Budget) {
    let hello = serde_json::to_vec(&Hello::default()).expect("a hello is JSON");
    let hello = frame::encode(0, Kind::Hello, 0, &hello);
    // Room for everything: the guest does not listen.
    let (near, mut far) = tokio::io::duplex(data.len() + hello.len() + (1 << 16));
    far.write_all(&hello).await.expect("room for the hello");
    let options = Options {
        budget,
        ..Options::default()
    };
    let client = Client::connect(near, options).await.expect("a good hello");
    let calls = client.by(Deadline::within(LIMIT));
    let path = || "/".to_owned();
    let work = async {
        let watching = async {
            let request = WatchRequest {
                path: path(),
                recursive: false,
            };
            if let Ok(mut watch) = calls.watch(request).await {
                while watch.next().await.is_ok() {}
            }
        };
        let dialling = async {
            if let Ok(peer) = calls.dial(DialRequest::Tcp("1".to_owned())).await {
                while let Ok(Some(_)) = peer.read().await {}
            }
        };
        let list = ListRequest {
            path: path(),
            depth: 1,
            limit: Some(100),
            attributes: None,
        };
        let exec = ExecRequest {
            shell: Some("true".to_owned()),
            ..Default::default()
        };
        tokio::join!(
            calls.ping(),
            calls.exec_capture_with(exec, b"input", 1 << 16),
            calls.eval(EvalRequest::default()),
            calls.list(list),
            calls.read_file("/", 1 << 16),
            watching,
            dialling,
        )
    };
    let speaking = async {
        far.write_all(data).await.expect("room for the input");
        far.shutdown().await.expect("an end");
    };
    let ((ping, exec, eval, list, read, (), ()), ()) = tokio::join!(work, speaking);
    for late in [ping.err(), exec.err(), eval.err(), list.err(), read.err()] {
        let timed_out = matches!(late, Some(forkd_agent_client::Error::Timeout));
        assert!(!timed_out, "a call waits for a connection that is closed");
    }
}
