//! The engine as a program, with a TCP stack in memory as guest and servers on the loopback interface as world.

mod namespaces;
mod rig;
mod world;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::thread;

use forkd_net_proto::{EndCause, FromNet, NetCommand, NetReply, Reason, Verdict};
use forkd_types::{Mode, Policy};
use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, Record, RecordType, rdata};
use rig::{Engine, Guest, policy};
use smoltcp::socket::tcp::State;

/// The program that the tests start.
const ENGINE: &str = env!("CARGO_BIN_EXE_forkd-net");
const LOOPBACK: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// A server that sends back what it gets, and ends when the client does.
fn echo_server() -> u16 {
    let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let (mut from, mut to) = (stream.try_clone().unwrap(), stream);
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(std::net::Shutdown::Write);
            });
        }
    });
    port
}

#[test]
fn bytes_go_both_ways_and_each_side_ends_its_own() {
    let engine = Engine::start(&[]);
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow host"]));
    let port = echo_server();
    let sent: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let socket = guest.connect(LOOPBACK, port);
    guest.run_until(socket, |tcp| tcp.may_send());
    let (mut written, mut got) = (0, Vec::new());
    guest.run_until(socket, |tcp| {
        if written < sent.len() {
            written += tcp.send_slice(&sent[written..]).unwrap();
            if written == sent.len() {
                tcp.close();
            }
        }
        while tcp.can_recv() {
            tcp.recv(|bytes| (bytes.len(), got.extend_from_slice(bytes)))
                .unwrap();
        }
        got.len() == sent.len()
    });
    assert!(got == sent, "the bytes differ");
    guest.run_until(socket, |tcp| {
        matches!(tcp.state(), State::TimeWait | State::Closed)
    });
    let counters = engine.stats("sb-1").counters;
    assert_eq!(
        (counters.bytes_up, counters.bytes_down),
        (3_000_000, 3_000_000)
    );
    assert_eq!((counters.flows, counters.denied), (1, 0));
    let entry = engine.log("sb-1").pop().unwrap();
    assert_eq!(
        (entry.verdict, entry.up, entry.down),
        (Verdict::Allowed, 3_000_000, 3_000_000)
    );
}

#[test]
fn connect_tells_the_truth() {
    let engine = Engine::start(&[]);
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow host"]));
    let closed = TcpListener::bind((LOOPBACK, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let socket = guest.connect(LOOPBACK, closed);
    guest.run_until(socket, |tcp| tcp.state() == State::Closed);
    assert_eq!(
        engine.log("sb-1").pop().unwrap().reason,
        Reason::Unreachable
    );
}

#[test]
fn a_denied_connection_is_reset_and_recorded() {
    let engine = Engine::start(&[]);
    let port = echo_server();
    for (id, policy, reason) in [
        (
            "sb-1",
            Policy::none(),
            Reason::Group(forkd_types::Group::Host),
        ),
        (
            "sb-2",
            policy(Mode::Public, &[]),
            Reason::Group(forkd_types::Group::Host),
        ),
        (
            "sb-3",
            policy(Mode::Public, &["deny 127.0.0.0/8"]),
            Reason::Rule(0),
        ),
    ] {
        let mut guest = engine.attach(id, &policy);
        let socket = guest.connect(LOOPBACK, port);
        guest.run_until(socket, |tcp| tcp.state() == State::Closed);
        let entry = engine.log(id).pop().unwrap();
        assert_eq!(
            (entry.verdict, entry.reason, entry.port),
            (Verdict::Denied, reason, port)
        );
        assert_eq!(engine.stats(id).counters.denied, 1);
    }
}

/// Opens a connection and sends a byte there and back.
fn open(guest: &mut Guest, port: u16) -> smoltcp::iface::SocketHandle {
    let socket = guest.connect(LOOPBACK, port);
    guest.run_until(socket, |tcp| tcp.may_send());
    ping(guest, socket);
    socket
}

fn ping(guest: &mut Guest, socket: smoltcp::iface::SocketHandle) {
    guest.socket(socket).send_slice(b"x").unwrap();
    guest.run_until(socket, |tcp| tcp.recv_slice(&mut [0; 1]) == Ok(1));
}

#[test]
fn a_new_policy_ends_what_it_forbids_and_nothing_else() {
    let engine = Engine::start(&[]);
    let (one, two) = (echo_server(), echo_server());
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow host"]));
    let (first, second) = (open(&mut guest, one), open(&mut guest, two));
    let rule = format!("allow host:{two}");
    engine.done(NetCommand::SetPolicy {
        id: "sb-1".parse().unwrap(),
        policy: policy(Mode::Custom, &[&rule]),
        brokered: Vec::new(),
        generation: 2,
    });
    guest.run_until(first, |tcp| tcp.state() == State::Closed);
    ping(&mut guest, second);
    assert_eq!(engine.stats("sb-1").generation, 2);
}

#[test]
fn connections_from_before_a_reset_get_a_reset() {
    let engine = Engine::start(&[]);
    let port = echo_server();
    let allow = policy(Mode::Custom, &["allow host"]);
    let mut guest = engine.attach("sb-1", &allow);
    let socket = open(&mut guest, port);
    engine.done(NetCommand::Reset {
        id: "sb-1".parse().unwrap(),
    });
    // The guest only waits, and hears of the end all the same.
    guest.run_until(socket, |tcp| tcp.state() == State::Closed);

    // A child has the source's connection and a pair of its own.
    let source = open(&mut guest, port);
    let mut child = engine.attach_stack("sb-2", &allow, &mut guest);
    child.socket(source).send_slice(b"x").unwrap();
    child.run_until(source, |tcp| tcp.state() == State::Closed);
    let mut guest = child.give_back(&engine, "sb-1");
    assert_eq!(guest.socket(source).state(), State::Closed);
    let fresh = open(&mut guest, port);
    ping(&mut guest, fresh);
}

#[test]
fn limits_hold() {
    let engine = Engine::start(&[]);
    let port = echo_server();
    let limits = forkd_types::NetLimits {
        connections: 2,
        ..Default::default()
    };
    let rules = vec!["allow host".parse().unwrap()];
    let mut guest = engine.attach("sb-1", &Policy::new(Mode::Custom, rules, limits).unwrap());
    let first = open(&mut guest, port);
    open(&mut guest, port);
    let third = guest.connect(LOOPBACK, port);
    guest.run_until(third, |tcp| tcp.state() == State::Closed);
    assert_eq!(engine.log("sb-1").pop().unwrap().reason, Reason::Limit);
    ping(&mut guest, first);
}

#[test]
fn datagrams_are_relayed_or_refused() {
    let engine = Engine::start(&[]);
    let server = UdpSocket::bind((LOOPBACK, 0)).unwrap();
    let port = server.local_addr().unwrap().port();
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((len, from)) = server.recv_from(&mut buffer) {
            let _ = server.send_to(&buffer[..len], from);
        }
    });
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow host"]));
    guest.send_datagram(LOOPBACK, port, b"hello");
    assert_eq!(
        guest.receive_datagram().unwrap(),
        (LOOPBACK, port, b"hello".to_vec())
    );
    let mut denied = engine.attach("sb-2", &Policy::none());
    denied.send_datagram(LOOPBACK, port, b"hello");
    assert_eq!(
        denied.receive_datagram(),
        None,
        "an ICMP error was expected"
    );
    assert_eq!(engine.log("sb-2").len(), 1);
}

/// A name server that knows one name.
fn name_server(address: Ipv4Addr) -> std::net::SocketAddr {
    let server = UdpSocket::bind((LOOPBACK, 0)).unwrap();
    let at = server.local_addr().unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((len, from)) = server.recv_from(&mut buffer) {
            let mut answer = Message::from_vec(&buffer[..len]).unwrap().into_response();
            let name = answer.queries[0].name().clone();
            assert!(name.to_ascii().starts_with("good."), "{name} was forwarded");
            answer.add_answer(Record::from_rdata(name, 5, RData::A(rdata::A(address))));
            server.send_to(&answer.to_vec().unwrap(), from).unwrap();
        }
    });
    at
}

fn ask(guest: &mut Guest, name: &str) -> Message {
    let mut message = Message::query();
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    // Any server is answered by the resolver.
    guest.send_datagram(Ipv4Addr::new(8, 8, 8, 8), 53, &message.to_vec().unwrap());
    let (from, port, bytes) = guest.receive_datagram().unwrap();
    assert_eq!((from, port), (Ipv4Addr::new(8, 8, 8, 8), 53));
    let answer = Message::from_vec(&bytes).unwrap();
    assert_eq!(answer.metadata.id, message.metadata.id);
    answer
}

#[test]
fn names_are_resolved_only_if_a_rule_allows_them() {
    let engine = Engine::start(&[name_server(Ipv4Addr::new(198, 51, 100, 7))]);
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow good.example:443"]));
    assert_eq!(ask(&mut guest, "good.example.").answers.len(), 1);
    let denied = ask(&mut guest, "data.evil.example.");
    assert_eq!(denied.metadata.response_code, ResponseCode::NXDomain);
    let counters = engine.stats("sb-1").counters;
    assert_eq!((counters.dns, counters.dns_denied), (2, 1));
}

#[test]
fn a_public_name_does_not_lead_into_the_host() {
    let engine = Engine::start(&[name_server(LOOPBACK)]);
    let mut guest = engine.attach("sb-1", &policy(Mode::Public, &[]));
    let answer = ask(&mut guest, "good.example.");
    assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
    assert!(answer.answers.is_empty());
}

#[test]
fn a_denied_name_is_reset_by_its_host_header() {
    let engine = Engine::start(&[]);
    let port = echo_server();
    let rules = ["deny evil.example", "allow host"];
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &rules));
    let request = |name: &str| format!("GET / HTTP/1.1\r\nHost: {name}\r\n\r\n").into_bytes();
    let good = guest.connect(LOOPBACK, port);
    guest.run_until(good, |tcp| tcp.may_send());
    guest
        .socket(good)
        .send_slice(&request("good.example"))
        .unwrap();
    guest.run_until(good, |tcp| {
        tcp.recv_queue() == request("good.example").len()
    });
    let evil = guest.connect(LOOPBACK, port);
    guest.run_until(evil, |tcp| tcp.may_send());
    guest
        .socket(evil)
        .send_slice(&request("evil.example"))
        .unwrap();
    guest.run_until(evil, |tcp| tcp.state() == State::Closed);
    let entry = engine.log("sb-1").pop().unwrap();
    assert_eq!(
        (entry.reason, entry.name.as_deref()),
        (Reason::Rule(0), Some("evil.example"))
    );
}

#[test]
fn the_engine_outlives_its_controller_and_ends_with_the_vm() {
    let mut engine = Engine::start(&[]);
    let port = echo_server();
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow host"]));
    let socket = open(&mut guest, port);
    engine.reconnect();
    ping(&mut guest, socket);
    let listed = engine.ask(NetCommand::List { after: None }, &[]).unwrap();
    assert!(matches!(listed, NetReply::List { ids, more: false } if ids.len() == 1));
    drop(guest);
    let ended = engine.next_event();
    assert!(
        matches!(
            ended,
            FromNet::Ended {
                why: EndCause::Closed,
                ..
            }
        ),
        "{ended:?}"
    );
    let totals = engine.ask(NetCommand::Totals, &[]).unwrap();
    assert!(matches!(totals, NetReply::Totals { counters, sandboxes: 0 } if counters.flows == 1));
}

#[test]
fn a_server_that_breaks_its_connection_breaks_the_guests() {
    let engine = Engine::start(&[]);
    let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow host"]));
    let socket = guest.connect(LOOPBACK, port);
    let (mut stream, _) = listener.accept().unwrap();
    guest.run_until(socket, |tcp| tcp.may_send());
    stream.write_all(b"abc").unwrap();
    guest.run_until(socket, |tcp| tcp.recv_queue() == 3);
    // Closing with unread bytes sends a reset.
    guest.socket(socket).send_slice(b"unread").unwrap();
    guest.run_until(socket, |tcp| tcp.send_queue() == 0);
    stream.peek(&mut [0; 1]).unwrap();
    drop(stream);
    guest.run_until(socket, |tcp| tcp.state() == State::Closed);
}

#[test]
fn a_guest_that_breaks_its_connection_breaks_the_servers() {
    let engine = Engine::start(&[]);
    let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &["allow host"]));
    let socket = guest.connect(LOOPBACK, port);
    let (mut stream, _) = listener.accept().unwrap();
    guest.run_until(socket, |tcp| tcp.may_send());
    guest.socket(socket).abort();
    guest.poll();
    let error = stream.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

/// The policy that opens the host under these limits.
fn limited(limits: forkd_types::NetLimits) -> Policy {
    Policy::new(Mode::Custom, vec!["allow host".parse().unwrap()], limits).unwrap()
}

/// Sends bytes to an echo server and returns how many came back before the connection ended or all were back.
fn echo(guest: &mut Guest, port: u16, count: usize) -> usize {
    let socket = guest.connect(LOOPBACK, port);
    guest.run_until(socket, |tcp| tcp.may_send());
    let sent = vec![7; count];
    let (mut written, mut got) = (0, 0);
    guest.run_until(socket, |tcp| {
        if written < sent.len() && tcp.may_send() {
            written += tcp.send_slice(&sent[written..]).unwrap();
        }
        while tcp.can_recv() {
            tcp.recv(|bytes| (bytes.len(), got += bytes.len())).unwrap();
        }
        got == count || tcp.state() == State::Closed
    });
    got
}

#[test]
fn a_rate_slows_flows_down_and_can_be_lifted_live() {
    let engine = Engine::start(&[]);
    let port = echo_server();
    let limits = forkd_types::NetLimits {
        egress_mbit: Some(40),
        ingress_mbit: Some(80),
        ..Default::default()
    };
    let mut guest = engine.attach("sb-1", &limited(limits));
    let start = std::time::Instant::now();
    assert_eq!(echo(&mut guest, port, 2_000_000), 2_000_000);
    // 5 MB a second after a burst of 250 kB: it cannot have been faster.
    let least = std::time::Duration::from_millis(300);
    assert!(start.elapsed() > least, "{:?}", start.elapsed());
    let counters = engine.stats("sb-1").counters;
    assert!(counters.limited > 0, "{counters:?}");
    engine.done(NetCommand::SetPolicy {
        id: "sb-1".parse().unwrap(),
        policy: limited(Default::default()),
        brokered: Vec::new(),
        generation: 2,
    });
    assert_eq!(echo(&mut guest, port, 2_000_000), 2_000_000);
    assert_eq!(engine.stats("sb-1").counters.limited, counters.limited);
}

#[test]
fn flows_share_a_rate() {
    let engine = Engine::start(&[]);
    let port = echo_server();
    let limits = forkd_types::NetLimits {
        egress_mbit: Some(40),
        ..Default::default()
    };
    let mut guest = engine.attach("sb-1", &limited(limits));
    let sockets: Vec<_> = (0..3).map(|_| open(&mut guest, port)).collect();
    let mut moved = [0usize; 3];
    let sent = vec![1; 65536];
    let start = std::time::Instant::now();
    // Each flow sends as much as it can until one has sent a megabyte.
    while moved.iter().max().unwrap() < &1_000_000 {
        guest.poll();
        for (socket, moved) in sockets.iter().zip(&mut moved) {
            let tcp = guest.socket(*socket);
            *moved += tcp.send_slice(&sent).unwrap();
            while tcp.can_recv() {
                tcp.recv(|bytes| (bytes.len(), ())).unwrap();
            }
        }
        assert!(start.elapsed().as_secs() < 60, "{moved:?}");
    }
    assert!(moved.iter().all(|bytes| *bytes > 500_000), "{moved:?}");
}

#[test]
fn a_total_of_bytes_ends_flows_and_refuses_new_ones() {
    let engine = Engine::start(&[]);
    let port = echo_server();
    let limits = forkd_types::NetLimits {
        egress_mib_total: Some(1),
        ..Default::default()
    };
    let mut guest = engine.attach("sb-1", &limited(limits));
    assert!(echo(&mut guest, port, 2 << 20) < 2 << 20);
    assert_eq!(engine.stats("sb-1").counters.bytes_up, 1 << 20);
    let socket = guest.connect(LOOPBACK, port);
    guest.run_until(socket, |tcp| tcp.state() == State::Closed);
    guest.send_datagram(LOOPBACK, 9, b"x");
    assert_eq!(guest.receive_datagram(), None);
    let reasons: Vec<Reason> = engine
        .log("sb-1")
        .iter()
        .map(|entry| entry.reason)
        .collect();
    assert_eq!(
        reasons
            .iter()
            .filter(|reason| **reason == Reason::Quota)
            .count(),
        3
    );
    // A larger total opens the network again.
    let limits = forkd_types::NetLimits {
        egress_mib_total: Some(4),
        ..Default::default()
    };
    engine.done(NetCommand::SetPolicy {
        id: "sb-1".parse().unwrap(),
        policy: limited(limits),
        brokered: Vec::new(),
        generation: 2,
    });
    assert_eq!(echo(&mut guest, port, 1 << 20), 1 << 20);
}

/// A name server over UDP and TCP with answers that fit into no datagram.
fn long_name_server() -> std::net::SocketAddr {
    let (tcp, udp) = loop {
        let tcp = TcpListener::bind((LOOPBACK, 0)).unwrap();
        if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()) {
            break (tcp, udp);
        }
    };
    let at = tcp.local_addr().unwrap();
    let answer = |question: &[u8]| {
        let mut answer = Message::from_vec(question).unwrap().into_response();
        let name = answer.queries[0].name().clone();
        for last in 1..=200 {
            let address = rdata::A(Ipv4Addr::new(198, 51, 100, last));
            answer.add_answer(Record::from_rdata(name.clone(), 5, RData::A(address)));
        }
        answer
    };
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((len, from)) = udp.recv_from(&mut buffer) {
            let mut short = answer(&buffer[..len]).truncate();
            short.metadata.truncation = true;
            udp.send_to(&short.to_vec().unwrap(), from).unwrap();
        }
    });
    thread::spawn(move || {
        for mut stream in tcp.incoming().flatten() {
            let mut len = [0; 2];
            stream.read_exact(&mut len).unwrap();
            let mut question = vec![0; usize::from(u16::from_be_bytes(len))];
            stream.read_exact(&mut question).unwrap();
            let bytes = answer(&question).to_vec().unwrap();
            let len = u16::try_from(bytes.len()).unwrap();
            stream.write_all(&len.to_be_bytes()).unwrap();
            stream.write_all(&bytes).unwrap();
        }
    });
    at
}

#[test]
fn long_answers_come_over_tcp() {
    let engine = Engine::start(&[long_name_server()]);
    let rules = ["allow good.example:443"];
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &rules));
    assert!(ask(&mut guest, "good.example.").metadata.truncation);
    // Any server is answered by the resolver, and two questions share a connection.
    let socket = guest.connect(Ipv4Addr::new(8, 8, 8, 8), 53);
    guest.run_until(socket, |tcp| tcp.may_send());
    for name in ["evil.example.", "good.example."] {
        let mut message = Message::query();
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
        let bytes = message.to_vec().unwrap();
        let len = u16::try_from(bytes.len()).unwrap().to_be_bytes();
        let tcp = guest.socket(socket);
        tcp.send_slice(&[&len[..], &bytes].concat()).unwrap();
    }
    let mut got = Vec::new();
    let mut answers = Vec::new();
    guest.run_until(socket, |tcp| {
        while tcp.can_recv() {
            tcp.recv(|bytes| (bytes.len(), got.extend_from_slice(bytes)))
                .unwrap();
        }
        while got.len() > 2 {
            let len = usize::from(u16::from_be_bytes([got[0], got[1]]));
            if got.len() < 2 + len {
                break;
            }
            answers.push(Message::from_vec(&got[2..2 + len]).unwrap());
            got.drain(..2 + len);
        }
        answers.len() == 2
    });
    assert_eq!(answers[0].metadata.response_code, ResponseCode::NXDomain);
    assert_eq!(answers[1].answers.len(), 200);
    guest.socket(socket).close();
    guest.run_until(socket, |tcp| {
        matches!(tcp.state(), State::TimeWait | State::Closed)
    });
}

#[test]
fn a_guest_can_read_why_it_was_denied() {
    let engine = Engine::start(&[]);
    let mut guest = engine.attach("sb-1", &Policy::none());
    let denied = guest.connect(Ipv4Addr::new(198, 51, 100, 7), 443);
    guest.run_until(denied, |tcp| tcp.state() == State::Closed);
    let page = guest.connect(Ipv4Addr::new(10, 42, 0, 1), 80);
    guest.run_until(page, |tcp| tcp.may_send());
    let request = b"GET /denied HTTP/1.1\r\nhost: 10.42.0.1\r\n\r\n";
    guest.socket(page).send_slice(request).unwrap();
    let mut got = Vec::new();
    guest.run_until(page, |tcp| {
        while tcp.can_recv() {
            tcp.recv(|bytes| (bytes.len(), got.extend_from_slice(bytes)))
                .unwrap();
        }
        !tcp.may_recv()
    });
    let text = String::from_utf8(got).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(
        body.contains(r#""address":"198.51.100.7","port":443"#),
        "{body}"
    );
    assert!(body.contains("the network mode none"), "{body}");
}
