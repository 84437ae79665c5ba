//! Clients without a token.

mod doors;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use doors::Doors;
use forkd_controller::serve::Front;
use forkd_edge::config::EdgeConfig;
use forkd_edge::listen::Limits;
use forkd_sandboxes::app::App;
use forkd_sandboxes::config::Config;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Resident memory of this process in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let word = line.and_then(|line| line.split_whitespace().nth(1));
    word.unwrap().parse().unwrap()
}

/// One client: wrong requests on one connection, each with a method and a path that no other request has.
async fn wrong(doors: &Doors, client: usize, requests: usize) {
    let mut stream = doors.connect_from([127, 0, 1, 1]).await.unwrap();
    let mut answer = vec![0; 64 << 10];
    for number in 0..requests {
        let unique = format!("{client}x{number}x{}", "M".repeat(4096));
        let request = format!("{unique} /{unique} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut filled = 0;
        // The body of a refusal ends with the request's id.
        while !answer[..filled].ends_with(b"\"}") {
            let read = stream.read(&mut answer[filled..]).await.unwrap();
            assert!(read > 0, "the connection was closed");
            filled += read;
        }
        assert!(answer.starts_with(b"HTTP/1.1 401"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn clients_without_a_token_cost_no_memory() {
    forkd_edge::metrics::install();
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "alice=correct-horse-battery").unwrap();
    let audit = dir.path().join("audit.log");
    let edge = EdgeConfig {
        token_file: Some(token),
        audit_log: Some(audit.clone()),
        ..EdgeConfig::closed()
    };
    let (app, _endings) = App::open(Config::below(dir.path())).unwrap();
    tokio::spawn(forkd_edge::metrics::keep_drained(app.stopping.clone()));
    let front = Front::open(&app, &edge).unwrap();
    let limits = Limits::default();
    let doors = Arc::new(Doors::open(front.router, limits, dir.path()).await);
    let load = async |requests: usize| {
        let clients = (0..100).map(|client| {
            let doors = Arc::clone(&doors);
            tokio::spawn(async move { wrong(&doors, client + 1000 * requests, requests).await })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.unwrap();
        }
    };
    load(10).await;
    let before = resident_kib();
    let ended = Arc::new(AtomicBool::new(false));
    let asking = {
        let (socket, ended) = (doors.socket.clone(), Arc::clone(&ended));
        std::thread::spawn(move || {
            let mut slowest = Duration::ZERO;
            let mut answers = 0;
            while !ended.load(Ordering::Relaxed) {
                let asked = Instant::now();
                // 503: there is no forkd-spawn here.
                assert!(Doors::ask_unix(&socket).starts_with("HTTP/1.1 503"));
                slowest = slowest.max(asked.elapsed());
                answers += 1;
            }
            (answers, slowest)
        })
    };
    load(100).await;
    ended.store(true, Ordering::Relaxed);
    let (answers, slowest) = asking.join().unwrap();
    let grown = resident_kib().saturating_sub(before);
    println!(
        "10,000 wrong requests: {grown} KiB more, {answers} answers on the Unix socket, the slowest after {slowest:?}"
    );
    assert!(answers > 0);
    assert!(grown < 24 << 10, "{grown} KiB more");
    let logged = std::fs::metadata(&audit).unwrap().len();
    assert!(logged < 1 << 20, "{logged} bytes of audit log");
}
