//! The broker as a process. The test stands in for the engine: it hands over streams and connected sockets.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use forkd_net_proto::broker::{BrokerCommand, BrokerReply, BrokeredFlow, FromBroker, Refusal};
use forkd_net_proto::encode;
use forkd_secrets_tests::{
    Broker, PATIENCE, Recorded, TestAuthority, client, rule, serve, tls_client,
};
use rustls::{ClientConnection, StreamOwned};

const PROGRAM: &str = env!("CARGO_BIN_EXE_broker-with-secrets");
const PLACEHOLDER: &str = "fkd_0123456789abcdef0123456789abcdef";
const VALUE: &str = "sk-live-7f1c0d4e";

type Client = StreamOwned<ClientConnection, UnixStream>;

struct Rig {
    broker: Broker,
    link: OwnedFd,
    recorded: Recorded,
    port: u16,
}

impl Rig {
    /// A server with a certificate for these names, and a broker that trusts its authority.
    fn start(names: &[&str]) -> Self {
        let world = TestAuthority::default();
        let broker = Broker::start(PROGRAM, &world);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (recorded, config) = (Recorded::default(), world.server(names));
        let record = recorded.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (config, record) = (Arc::clone(&config), record.clone());
                thread::spawn(move || serve(stream, config, &record));
            }
        });
        let link = broker.link();
        Self {
            broker,
            link,
            recorded,
            port,
        }
    }

    /// A connection of a guest that the engine handed over.
    fn stream(&self, id: &str, to: &str) -> UnixStream {
        let (guest, theirs) = UnixStream::pair().unwrap();
        guest.set_read_timeout(Some(PATIENCE)).unwrap();
        let upstream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        upstream.set_nonblocking(true).unwrap();
        let flow = BrokeredFlow {
            id: id.parse().unwrap(),
            to: to.parse().unwrap(),
        };
        let fds = [theirs.as_fd(), upstream.as_fd()];
        forkd_channel::send(&self.link, &encode(&flow).unwrap(), &fds).unwrap();
        guest
    }

    fn connect(&self, id: &str, to: &str) -> Client {
        tls_client(self.stream(id, to), &client(&self.broker.certificate), to)
    }

    /// One request on a new connection, until its end.
    fn ask(&self, id: &str, to: &str, lines: &str) -> String {
        let mut stream = self.connect(id, to);
        let text = format!("GET /v1 HTTP/1.1\r\nHost: {to}\r\n{lines}\r\n");
        stream.write_all(text.as_bytes()).unwrap();
        answer(&mut stream)
    }
}

/// One answer of a server of the test or of the broker.
fn answer(stream: &mut Client) -> String {
    let mut text = String::new();
    let mut buffer = [0; 4096];
    loop {
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "));
            if body.len() == length.unwrap().parse::<usize>().unwrap() {
                return text;
            }
        }
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "the connection ended after {text:?}");
        text.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
    }
}

#[test]
fn every_request_of_a_connection_has_its_secret() {
    let rig = Rig::start(&["api.example"]);
    let rules = vec![rule(
        "api.example",
        "Authorization",
        "Bearer ${secret:key}",
        None,
    )];
    rig.broker.set_rules("sb-1", "ann", rules);
    rig.broker.set_secret("ann", "key", VALUE);
    let mut stream = rig.connect("sb-1", "api.example");
    stream
        .write_all(b"GET /a HTTP/1.1\r\nHost: api.example\r\nauthorization: guessed\r\n\r\n")
        .unwrap();
    assert!(answer(&mut stream).ends_with("answer 1 of 0"));
    // A body that looks like a request stays a body.
    let body = b"GET /evil HTTP/1.1\r\nHost: api.example\r\n\r\n".repeat(20_000);
    let head = format!(
        "POST /b HTTP/1.1\r\nHost: api.example\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&body).unwrap();
    assert!(answer(&mut stream).ends_with(&format!("answer 2 of {}", body.len())));
    // The value of now, not of the time at which the connection was made.
    rig.broker.set_secret("ann", "key", "rotated-1");
    stream
        .write_all(b"PUT /c HTTP/1.1\r\nHost: api.example\r\nTransfer-Encoding: chunked\r\n\r\n")
        .unwrap();
    stream.write_all(b"5\r\nhello\r\n0\r\n\r\n").unwrap();
    assert!(answer(&mut stream).ends_with("answer 3 of 5"));
    let heads = rig.recorded.all();
    let bearer = |value: &str| format!("authorization: Bearer {value}\r\n");
    assert!(heads[0].0.contains(&bearer(VALUE)) && !heads[0].0.contains("guessed"));
    assert!(heads[1].0.contains(&bearer(VALUE)));
    assert!(heads[2].0.contains(&bearer("rotated-1")));
    let totals = rig.broker.ask(BrokerCommand::Totals, &[]).unwrap();
    let BrokerReply::Totals(counters) = totals else {
        panic!("{totals:?}")
    };
    assert_eq!(
        (counters.connections, counters.requests, counters.refused),
        (1, 3, 0)
    );
    let printed = rig.broker.end();
    assert!(!printed.contains(VALUE), "{printed}");
}

#[test]
fn a_placeholder_becomes_the_secret() {
    let rig = Rig::start(&["api.example"]);
    let rules = vec![rule(
        "api.example",
        "x-api-key",
        "${secret:key}",
        Some(PLACEHOLDER),
    )];
    rig.broker.set_rules("sb-1", "ann", rules);
    rig.broker.set_secret("ann", "key", VALUE);
    let lines = format!("X-Api-Key: {PLACEHOLDER}\r\n");
    assert!(
        rig.ask("sb-1", "api.example", &lines)
            .ends_with("answer 1 of 0")
    );
    assert!(
        rig.recorded.all()[0]
            .0
            .contains(&format!("X-Api-Key: {VALUE}\r\n"))
    );
    let missing = rig.ask("sb-1", "api.example", "");
    assert!(
        missing.starts_with("HTTP/1.1 403") && missing.contains("placeholder_missing"),
        "{missing}"
    );
    let elsewhere = rig.ask(
        "sb-1",
        "api.example",
        &format!("{lines}Cookie: a={PLACEHOLDER}\r\n"),
    );
    assert!(elsewhere.contains("placeholder_misplaced"), "{elsewhere}");
    assert_eq!(rig.recorded.all().len(), 1);
}

#[test]
fn no_request_goes_out_without_its_secret() {
    let rig = Rig::start(&["api.example"]);
    let rules = || {
        vec![rule(
            "api.example",
            "Authorization",
            "Bearer ${secret:key}",
            None,
        )]
    };
    // The secret of another owner is no secret of this one.
    rig.broker.set_rules("sb-2", "bob", rules());
    rig.broker.set_secret("bob", "key", VALUE);
    rig.broker.set_rules("sb-1", "ann", rules());
    let refused = rig.ask("sb-1", "api.example", "");
    assert!(
        refused.starts_with("HTTP/1.1 403") && refused.contains("secret_missing"),
        "{refused}"
    );
    let FromBroker::Refused { id, reason, .. } = rig.broker.news() else {
        panic!()
    };
    assert_eq!((id.as_str(), reason), ("sb-1", Refusal::NoSecret));
    // A rule that was taken away while a connection is open.
    let mut stream = rig.connect("sb-2", "api.example");
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: api.example\r\n\r\n")
        .unwrap();
    assert!(answer(&mut stream).ends_with("answer 1 of 0"));
    rig.broker.set_rules("sb-2", "bob", Vec::new());
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: api.example\r\n\r\n")
        .unwrap();
    assert!(answer(&mut stream).contains("no_injection"));
    // A sandbox without a rule gets no TLS at all.
    let mut stranger = rig.connect("sb-3", "api.example");
    assert!(stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").is_err());
    // Another host in the request than in TLS, and another one in TLS than in the rule.
    rig.broker.set_secret("ann", "key", VALUE);
    let mut stream = rig.connect("sb-1", "api.example");
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n")
        .unwrap();
    assert!(answer(&mut stream).contains("wrong_host"));
    let trusts = client(&rig.broker.certificate);
    let mut stream = tls_client(rig.stream("sb-1", "api.example"), &trusts, "other.example");
    assert!(stream.write_all(b"GET / HTTP/1.1\r\n\r\n").is_err());
    assert_eq!(rig.recorded.all().len(), 1);
}

#[test]
fn an_upstream_must_prove_its_name() {
    let rig = Rig::start(&["evil.example"]);
    let rules = vec![rule(
        "api.example",
        "Authorization",
        "Bearer ${secret:key}",
        None,
    )];
    rig.broker.set_rules("sb-1", "ann", rules);
    rig.broker.set_secret("ann", "key", VALUE);
    let refused = rig.ask("sb-1", "api.example", "");
    assert!(
        refused.starts_with("HTTP/1.1 502") && refused.contains("certificate_invalid"),
        "{refused}"
    );
    assert!(rig.recorded.all().is_empty());
}

#[test]
fn a_guest_that_speaks_no_tls_or_goes_away_leaves_nothing_behind() {
    let rig = Rig::start(&["api.example"]);
    let rules = vec![rule(
        "api.example",
        "Authorization",
        "Bearer ${secret:key}",
        None,
    )];
    rig.broker.set_rules("sb-1", "ann", rules);
    rig.broker.set_secret("ann", "key", VALUE);
    let count = || {
        std::fs::read_dir(format!("/proc/{}/fd", rig.broker.pid()))
            .unwrap()
            .count()
    };
    let before = count();
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: api.example\r\n\r\n"[..],
        &[0x16, 3, 1, 0, 2, 1, 0],
        b"",
    ] {
        let mut stream = rig.stream("sb-1", "api.example");
        stream.write_all(bytes).unwrap();
    }
    let start = std::time::Instant::now();
    while count() != before {
        assert!(start.elapsed() < PATIENCE, "descriptors are left");
        thread::yield_now();
    }
    assert!(rig.recorded.all().is_empty());
}
