//! Clients that take connections and say nothing.

mod doors;

use std::time::Duration;

use axum::Router;
use axum::routing::get;
use doors::{ASK, Doors};
use forkd_edge::listen::Limits;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// So long that a test fails by its own time limit before one of these deadlines helps it.
const LONG: Duration = Duration::from_secs(3600);

/// The answer to `GET /healthz` over TCP.
async fn ask_from(doors: &Doors, source: [u8; 4]) -> String {
    let mut stream = doors.connect_from(source).await.unwrap();
    stream.write_all(ASK).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

fn well() -> Router {
    Router::new().route("/healthz", get(async || "well"))
}

/// Whether the server closes a connection on which nothing more is sent.
async fn closes(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    let read = tokio::time::timeout(LONG, stream.read_to_end(&mut rest)).await;
    read.is_ok()
}

#[tokio::test]
async fn silent_connections_take_no_place_of_others() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        tcp: 8,
        per_peer: 6,
        unix: 2,
        first_byte: LONG,
        ..Limits::default()
    };
    let doors = Doors::open(well(), limits, dir.path()).await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(doors.connect_from([127, 0, 0, 2]).await.unwrap());
    }
    // The surplus of one address is closed, so another address finds a place.
    let answer = ask_from(&doors, [127, 0, 0, 3]).await;
    assert!(answer.ends_with("well"), "{answer}");
    // The pool of the port is full, that of the Unix socket is not.
    let mut others = Vec::new();
    for host in 10..20 {
        others.push(doors.connect_from([127, 0, 0, host]).await.unwrap());
    }
    let socket = doors.socket.clone();
    let answer = tokio::task::spawn_blocking(move || Doors::ask_unix(&socket)).await;
    assert!(answer.unwrap().ends_with("well"));
}

#[tokio::test]
async fn the_soak_of_silent_connections() {
    let dir = tempfile::tempdir().unwrap();
    let limits = Limits {
        tcp: 300,
        per_peer: 200,
        first_byte: LONG,
        ..Limits::default()
    };
    let doors = Doors::open(well(), limits, dir.path()).await;
    let mut silent = Vec::new();
    for _ in 0..400 {
        silent.push(doors.connect_from([127, 0, 0, 2]).await.unwrap());
    }
    for _ in 0..50 {
        let answer = ask_from(&doors, [127, 0, 0, 3]).await;
        assert!(answer.ends_with("well"), "{answer}");
        let socket = doors.socket.clone();
        let answer = tokio::task::spawn_blocking(move || Doors::ask_unix(&socket)).await;
        assert!(answer.unwrap().ends_with("well"));
    }
}

#[tokio::test]
async fn a_connection_has_a_deadline_in_every_state() {
    let dir = tempfile::tempdir().unwrap();
    let short = Duration::from_millis(50);
    let base = Limits {
        first_byte: LONG,
        headers: LONG,
        idle: LONG,
        ..Limits::default()
    };
    // Says nothing; half the preface of HTTP/2; the whole preface and no request; headers without an end; a request and
    // then nothing.
    let idle = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n".as_slice();
    let cases = [
        (
            b"".as_slice(),
            Limits {
                first_byte: short,
                ..base
            },
        ),
        (
            b"PRI *",
            Limits {
                headers: short,
                ..base
            },
        ),
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
            Limits {
                headers: short,
                ..base
            },
        ),
        (
            b"GET /healthz HTTP/1.1\r\nHost: ",
            Limits {
                headers: short,
                ..base
            },
        ),
        (
            idle,
            Limits {
                idle: short,
                ..base
            },
        ),
    ];
    for (number, (said, limits)) in cases.into_iter().enumerate() {
        let dir = dir.path().join(number.to_string());
        let doors = Doors::open(well(), limits, &dir).await;
        let mut stream = doors.connect_from([127, 0, 0, 1]).await.unwrap();
        stream.write_all(said).await.unwrap();
        assert!(closes(&mut stream).await, "case {number}");
    }
}

#[tokio::test]
async fn a_response_in_flight_has_no_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let short = Duration::from_millis(20);
    let limits = Limits {
        first_byte: short,
        headers: short,
        idle: short,
        ..Limits::default()
    };
    let slow = Router::new().route(
        "/healthz",
        get(async || {
            tokio::time::sleep(Duration::from_millis(200)).await;
            "slow"
        }),
    );
    let doors = Doors::open(slow, limits, dir.path()).await;
    let answer = ask_from(&doors, [127, 0, 0, 1]).await;
    assert!(answer.ends_with("slow"), "{answer}");
}
