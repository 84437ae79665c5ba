//! The engine in a network namespace, the broker beside it, and a world with TLS in another namespace. Needs root.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;

use forkd_net_proto::{FdIndex, NetCommand, NetReply, Reason, Verdict};
use forkd_secrets_tests::{Broker, Recorded, TestAuthority, client, rule, serve};
use forkd_types::{Mode, Policy};
use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, Record, RecordType, rdata};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use smoltcp::iface::SocketHandle;
use smoltcp::socket::tcp::State;

use super::namespaces::Namespaces;
use super::rig::{Engine, Guest, policy};

const BROKER: &str = env!("CARGO_BIN_EXE_broker-with-secrets");
const API: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
const OTHER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 8);
const RESOLVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 53);
const VALUE: &str = "sk-live-90ab12";

struct World {
    spaces: Namespaces,
    authority: TestAuthority,
    recorded: Recorded,
}

impl World {
    fn make() -> Option<Self> {
        let spaces = Namespaces::make(&[API, OTHER, RESOLVER])?;
        let world = Self {
            spaces,
            authority: TestAuthority::default(),
            recorded: Recorded::default(),
        };
        let listen = |port: u16| {
            let bind = move || TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
            world.spaces.within_world(bind)
        };
        let (tls, plain) = (listen(443), listen(80));
        let config = world.authority.server(&["api.example", "other.example"]);
        let recorded = world.recorded.clone();
        thread::spawn(move || {
            for stream in tls.incoming().flatten() {
                let (config, recorded) = (Arc::clone(&config), recorded.clone());
                thread::spawn(move || serve(stream, config, &recorded));
            }
        });
        thread::spawn(move || {
            for mut stream in plain.incoming().flatten() {
                thread::spawn(move || {
                    let _ = stream.read(&mut [0; 1024]);
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
                });
            }
        });
        let names = world
            .spaces
            .within_world(|| UdpSocket::bind((RESOLVER, 53)).unwrap());
        thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((len, from)) = names.recv_from(&mut buffer) {
                let answer = resolve(&buffer[..len]).to_vec().unwrap();
                names.send_to(&answer, from).unwrap();
            }
        });
        Some(world)
    }

    fn engine(&self) -> Engine {
        let name = self.spaces.engine();
        let words = ["ip", "netns", "exec", name.as_str()];
        Engine::start_with(&words, &[(RESOLVER, 53).into()])
    }
}

fn resolve(question: &[u8]) -> Message {
    let mut answer = Message::from_vec(question).unwrap().into_response();
    let name = answer.queries[0].name().clone();
    let address = match name.to_ascii().trim_end_matches('.') {
        "api.example" => API,
        "other.example" => OTHER,
        _ => {
            answer.metadata.response_code = ResponseCode::NXDomain;
            return answer;
        }
    };
    answer.add_answer(Record::from_rdata(name, 60, RData::A(rdata::A(address))));
    answer
}

fn link(engine: &Engine, broker: &Broker) {
    let ours = broker.link();
    let command = NetCommand::SetBroker { link: FdIndex(0) };
    assert_eq!(engine.ask(command, &[ours.as_fd()]), Ok(NetReply::Done));
}

/// A policy that allows public addresses and has an injection for one host.
fn injecting() -> Policy {
    let rule = rule("api.example", "authorization", "Bearer ${secret:key}", None);
    policy(Mode::Public, &[])
        .with_inject(vec![rule.rule])
        .unwrap()
}

fn look_up(guest: &mut Guest, name: &str) {
    let mut message = Message::query();
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    guest.send_datagram(RESOLVER, 53, &message.to_vec().unwrap());
    let (_, _, bytes) = guest.receive_datagram().unwrap();
    assert_eq!(Message::from_vec(&bytes).unwrap().answers.len(), 1);
}

/// Sends bytes and returns everything that comes back until the connection ends, or until an answer is whole.
fn raw(guest: &mut Guest, to: Ipv4Addr, port: u16, bytes: &[u8]) -> Option<Vec<u8>> {
    let socket = open(guest, to, port)?;
    guest.socket(socket).send_slice(bytes).unwrap();
    let mut got = Vec::new();
    guest.run_until(socket, |tcp| {
        take(tcp, &mut got);
        !got.is_empty() || tcp.state() == State::Closed || !tcp.may_recv()
    });
    (!got.is_empty()).then_some(got)
}

fn open(guest: &mut Guest, to: Ipv4Addr, port: u16) -> Option<SocketHandle> {
    let socket = guest.connect(to, port);
    guest.run_until(socket, |tcp| tcp.may_send() || tcp.state() == State::Closed);
    guest.socket(socket).may_send().then_some(socket)
}

fn take(tcp: &mut smoltcp::socket::tcp::Socket<'_>, to: &mut Vec<u8>) {
    while tcp.can_recv() {
        tcp.recv(|bytes| {
            to.extend_from_slice(bytes);
            (bytes.len(), ())
        })
        .unwrap();
    }
}

/// A request over TLS of the guest. The answer, or `None` if the connection broke.
fn fetch(
    guest: &mut Guest,
    config: &Arc<ClientConfig>,
    to: Ipv4Addr,
    name: &str,
    host: &str,
) -> Option<String> {
    let socket = open(guest, to, 443)?;
    let server = ServerName::try_from(name.to_owned()).unwrap();
    let mut tls = ClientConnection::new(Arc::clone(config), server).unwrap();
    let request = format!("GET /v1 HTTP/1.1\r\nHost: {host}\r\nAuthorization: guess\r\n\r\n");
    tls.writer().write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let mut broken = false;
    guest.run_until(socket, |tcp| {
        let mut records = Vec::new();
        take(tcp, &mut records);
        let mut rest = records.as_slice();
        while !rest.is_empty() {
            tls.read_tls(&mut rest).unwrap();
            broken |= tls.process_new_packets().is_err();
        }
        let mut out = Vec::new();
        while tls.wants_write() {
            tls.write_tls(&mut out).unwrap();
        }
        if !out.is_empty() && tcp.may_send() {
            tcp.send_slice(&out).unwrap();
        }
        let _ = tls.reader().read_to_end(&mut answer);
        let whole = answer.windows(4).any(|part| part == b"\r\n\r\n");
        broken |= tcp.state() == State::Closed || !tcp.may_recv();
        whole || broken
    });
    guest.socket(socket).abort();
    guest.poll();
    (!answer.is_empty()).then(|| String::from_utf8(answer).unwrap())
}

fn last_denial(engine: &Engine) -> Option<Reason> {
    let denied = engine
        .log("sb-1")
        .into_iter()
        .filter(|entry| entry.verdict == Verdict::Denied);
    denied.last().map(|entry| entry.reason)
}

#[test]
fn a_host_with_an_injection_gets_its_secret_and_no_other_host_does() {
    let Some(world) = World::make() else { return };
    let engine = world.engine();
    let broker = Broker::start(BROKER, &world.authority);
    link(&engine, &broker);
    let rules = vec![rule(
        "api.example",
        "authorization",
        "Bearer ${secret:key}",
        None,
    )];
    broker.set_rules("sb-1", "ann", rules);
    broker.set_secret("ann", "key", VALUE);
    let mut guest = engine.attach("sb-1", &injecting());
    look_up(&mut guest, "api.example.");
    look_up(&mut guest, "other.example.");
    // The guest trusts the broker for the host of the rule.
    let ours = client(&broker.certificate);
    let answer = fetch(&mut guest, &ours, API, "api.example", "api.example").unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(!answer.contains(VALUE));
    // Another host is not intercepted: the guest sees the certificate of the world.
    let worlds = client(world.authority.certificate());
    let other = fetch(&mut guest, &worlds, OTHER, "other.example", "other.example").unwrap();
    assert!(other.starts_with("HTTP/1.1 200"), "{other}");
    let heads = world.recorded.all();
    assert!(
        heads[0]
            .0
            .contains(&format!("authorization: Bearer {VALUE}\r\n")),
        "{heads:?}"
    );
    assert!(!heads[0].0.contains("guess"));
    assert!(heads[1].0.contains("Authorization: guess\r\n") && !heads[1].0.contains(VALUE));
    // Another host in the request is refused by the broker.
    let forged = fetch(&mut guest, &ours, API, "api.example", "other.example").unwrap();
    assert!(forged.contains("wrong_host"), "{forged}");
    // The name of the host at an address that did not come from the resolver for it.
    assert_eq!(
        fetch(&mut guest, &worlds, OTHER, "api.example", "api.example"),
        None
    );
    assert_eq!(last_denial(&engine), Some(Reason::SecretHost));
    // Plain HTTP, and bytes that name no host.
    let plain = b"GET / HTTP/1.1\r\nHost: api.example\r\n\r\n";
    assert_eq!(raw(&mut guest, API, 80, plain), None);
    assert_eq!(last_denial(&engine), Some(Reason::SecretHost));
    assert_eq!(raw(&mut guest, API, 443, b"\0\0\0\0"), None);
    assert_eq!(last_denial(&engine), Some(Reason::SecretHost));
    let plain = b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n";
    assert!(raw(&mut guest, OTHER, 80, plain).is_some());
    assert_eq!(world.recorded.all().len(), 2);
}

#[test]
fn without_a_broker_nothing_goes_out_and_a_new_one_serves() {
    let Some(world) = World::make() else { return };
    let engine = world.engine();
    let mut guest = engine.attach("sb-1", &injecting());
    look_up(&mut guest, "api.example.");
    let worlds = client(world.authority.certificate());
    assert_eq!(
        fetch(&mut guest, &worlds, API, "api.example", "api.example"),
        None
    );
    assert_eq!(last_denial(&engine), Some(Reason::NoBroker));
    let serves = |guest: &mut Guest| {
        let broker = Broker::start(BROKER, &world.authority);
        link(&engine, &broker);
        let rules = vec![rule(
            "api.example",
            "authorization",
            "Bearer ${secret:key}",
            None,
        )];
        broker.set_rules("sb-1", "ann", rules);
        broker.set_secret("ann", "key", VALUE);
        let ours = client(&broker.certificate);
        let answer = fetch(guest, &ours, API, "api.example", "api.example").unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        broker
    };
    let broker = serves(&mut guest);
    let printed = broker.end();
    assert!(!printed.contains(VALUE), "{printed}");
    assert_eq!(
        fetch(&mut guest, &worlds, API, "api.example", "api.example"),
        None
    );
    assert_eq!(last_denial(&engine), Some(Reason::NoBroker));
    serves(&mut guest);
    assert_eq!(world.recorded.all().len(), 2);
}

#[test]
fn an_open_connection_does_not_outlive_a_change_of_injections() {
    let Some(world) = World::make() else { return };
    let engine = world.engine();
    let mut guest = engine.attach("sb-1", &policy(Mode::Public, &[]));
    look_up(&mut guest, "api.example.");
    let socket = open(&mut guest, API, 443).unwrap();
    let policy = injecting();
    engine.done(NetCommand::SetPolicy {
        id: "sb-1".parse().unwrap(),
        brokered: vec!["api.example".parse().unwrap()],
        policy: policy.without_inject(),
        generation: 2,
    });
    guest.run_until(socket, |tcp| tcp.state() == State::Closed);
    assert_eq!(last_denial(&engine), Some(Reason::SecretHost));
}
