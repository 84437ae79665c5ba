//! Rig K: the engine in a network namespace, and a world in another one, joined by a link.
//!
//! Addresses that look public, private or like a metadata service exist only inside the namespaces. The tests need root
//! for the namespaces; without it they say so and pass.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::process::Command;
use std::thread;

use forkd_net_proto::{NetCommand, Reason};
use forkd_types::{Group, Mode, NetLimits, Policy};
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RData, Record, rdata};
use smoltcp::socket::tcp::State;

use super::namespaces::{HOST, Namespaces, ip};
use super::rig::{Engine, Guest, policy};
use super::{ask, ping};

const PUBLIC: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
const OTHER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 8);
const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 5);
const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
const RESOLVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 53);
const ECHO: u16 = 7001;
/// A server that speaks first.
const GREETS: u16 = 22;
struct World {
    spaces: Namespaces,
}

impl World {
    /// The two namespaces with their servers; `None` without root.
    fn make() -> Option<Self> {
        let spaces = Namespaces::make(&[PUBLIC, OTHER, PRIVATE, METADATA, RESOLVER])?;
        let world = Self { spaces };
        world.serve();
        Some(world)
    }

    fn engine(&self) -> String {
        self.spaces.engine()
    }

    fn serve(&self) {
        let listen = |port| {
            self.spaces
                .within_world(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap())
        };
        for port in [80, 443, ECHO] {
            let listener = listen(port);
            thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    thread::spawn(move || {
                        let (mut from, mut to) = (stream.try_clone().unwrap(), stream);
                        let _ = std::io::copy(&mut from, &mut to);
                    });
                }
            });
        }
        let listener = listen(GREETS);
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let _ = stream.write_all(b"SSH-2.0-test\r\n");
                thread::spawn(move || stream.read(&mut [0; 64]));
            }
        });
        let names = self
            .spaces
            .within_world(|| UdpSocket::bind((RESOLVER, 53)).unwrap());
        thread::spawn(move || {
            let mut buffer = [0; 2048];
            while let Ok((len, from)) = names.recv_from(&mut buffer) {
                let answer = answer(&buffer[..len]).to_vec().unwrap();
                names.send_to(&answer, from).unwrap();
            }
        });
    }

    fn start(&self) -> Engine {
        self.start_with(&[])
    }

    fn start_with(&self, before: &[&str]) -> Engine {
        let mut words = vec!["ip", "netns", "exec"];
        let name = self.engine();
        words.push(&name);
        words.extend(before);
        Engine::start_with(&words, &[(RESOLVER, 53).into()])
    }
}

/// The answer of the name server of the world.
fn answer(question: &[u8]) -> Message {
    let mut answer = Message::from_vec(question).unwrap().into_response();
    let name = answer.queries[0].name().clone();
    let a =
        |name: &Name, address| Record::from_rdata(name.clone(), 60, RData::A(rdata::A(address)));
    match name.to_ascii().trim_end_matches('.') {
        "world.example" | "ssh.example" => {
            answer.add_answer(a(&name, PUBLIC));
        }
        "private.example" => {
            answer.add_answer(a(&name, PRIVATE));
        }
        "metadata.example" => {
            answer.add_answer(a(&name, METADATA));
        }
        "mixed.example" => {
            answer.add_answer(a(&name, PUBLIC));
            answer.add_answer(a(&name, PRIVATE));
        }
        "alias.example" => {
            let target = Name::from_ascii("private.example.").unwrap();
            let alias = RData::CNAME(rdata::CNAME(target.clone()));
            answer.add_answer(Record::from_rdata(name, 60, alias));
            answer.add_answer(a(&target, PRIVATE));
        }
        _ => answer.metadata.response_code = ResponseCode::NXDomain,
    }
    answer
}

/// The connection was accepted, or the reason of its denial.
type Verdict = Result<(), Reason>;

/// Connects and waits for the verdict.
fn reach(
    engine: &Engine,
    guest: &mut Guest,
    id: &str,
    to: Ipv4Addr,
    port: u16,
) -> Result<(), Reason> {
    if to.is_unspecified() || to.is_multicast() || to.is_broadcast() {
        // The stack of the guest opens no TCP connection to such an address.
        guest.send_datagram(to, port, b"x");
        assert_eq!(guest.receive_datagram(), None);
        return Err(engine.log(id).pop().unwrap().reason);
    }
    let socket = guest.connect(to, port);
    guest.run_until(socket, |tcp| tcp.may_send() || tcp.state() == State::Closed);
    if guest.socket(socket).may_send() {
        guest.socket(socket).abort();
        guest.poll();
        return Ok(());
    }
    Err(engine.log(id).pop().unwrap().reason)
}

#[test]
fn each_group_of_addresses_has_its_verdict() {
    let Some(world) = World::make() else { return };
    let engine = world.start();
    let denied = |group| Err(Reason::Group(group));
    let address = |text: &str| text.parse().unwrap();
    // A destination, and its verdict under `public` and under `open`.
    let table: [(Ipv4Addr, u16, Verdict, Verdict); 11] = [
        (PUBLIC, ECHO, Ok(()), Ok(())),
        (
            PUBLIC,
            9,
            Err(Reason::Unreachable),
            Err(Reason::Unreachable),
        ),
        (PRIVATE, ECHO, denied(Group::Private), Ok(())),
        (
            METADATA,
            80,
            denied(Group::Metadata),
            denied(Group::Metadata),
        ),
        (HOST, 80, denied(Group::Host), denied(Group::Host)),
        (
            address("127.0.0.1"),
            80,
            denied(Group::Host),
            denied(Group::Host),
        ),
        (
            address("0.0.0.0"),
            80,
            denied(Group::Host),
            denied(Group::Host),
        ),
        (
            address("100.64.0.1"),
            80,
            denied(Group::Private),
            Err(Reason::Unreachable),
        ),
        (
            address("169.254.1.1"),
            80,
            denied(Group::Reserved),
            denied(Group::Reserved),
        ),
        (
            address("224.0.0.1"),
            80,
            denied(Group::Reserved),
            denied(Group::Reserved),
        ),
        (
            address("255.255.255.255"),
            80,
            denied(Group::Reserved),
            denied(Group::Reserved),
        ),
    ];
    let mut public = engine.attach("sb-1", &policy(Mode::Public, &[]));
    let mut open = engine.attach("sb-2", &policy(Mode::Open, &[]));
    for (to, port, in_public, in_open) in table {
        assert_eq!(
            reach(&engine, &mut public, "sb-1", to, port),
            in_public,
            "{to}:{port}"
        );
        // Without a route back the kernel of the world refuses or drops; only known answers are compared.
        if to != address("100.64.0.1") {
            assert_eq!(
                reach(&engine, &mut open, "sb-2", to, port),
                in_open,
                "{to}:{port}"
            );
        }
    }
    // An address that the host gets later belongs to the host.
    ip(&format!(
        "-n {} address add {OTHER}/32 dev lo",
        world.engine()
    ));
    let start = std::time::Instant::now();
    while reach(&engine, &mut public, "sb-1", OTHER, ECHO) != denied(Group::Host) {
        assert!(
            start.elapsed().as_secs() < 60,
            "the new address is not noticed"
        );
    }
}

#[test]
fn names_lead_to_no_restricted_address() {
    let Some(world) = World::make() else { return };
    let engine = world.start();
    let mut guest = engine.attach("sb-1", &policy(Mode::Public, &[]));
    for (name, count) in [
        ("world.example.", 1),
        ("private.example.", 0),
        ("metadata.example.", 0),
        ("mixed.example.", 1),
        // The alias itself stays, the address behind it does not.
        ("alias.example.", 1),
        ("nowhere.example.", 0),
    ] {
        let found = ask(&mut guest, name);
        assert_eq!(found.answers.len(), count, "{name} {found:?}");
        let private = found.answers.iter().any(|record| match record.data {
            RData::A(a) => a.0 != PUBLIC,
            _ => false,
        });
        assert!(!private, "{name} {found:?}");
    }
}

/// A client hello with these server names, in one record.
fn hello(names: &[&str]) -> Vec<u8> {
    let long = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat();
    let entries: Vec<u8> = names
        .iter()
        .flat_map(|name| [&[0][..], &long(name.as_bytes())].concat())
        .collect();
    let mut extensions = vec![0, 43, 0, 3, 2, 3, 4];
    if !names.is_empty() {
        extensions.extend([&[0, 0][..], &long(&long(&entries))].concat());
    }
    let mut body = vec![3, 3];
    body.extend([7; 32]);
    body.extend([0, 0, 2, 0x13, 1, 1, 0]);
    body.extend(long(&extensions));
    let mut handshake = vec![1, 0];
    handshake.extend(long(&body));
    [&[0x16, 3, 1][..], &long(&handshake)].concat()
}

/// Sends first bytes and says whether the server sent them back.
fn passes(guest: &mut Guest, to: Ipv4Addr, port: u16, first: &[u8]) -> bool {
    let socket = guest.connect(to, port);
    guest.run_until(socket, |tcp| tcp.may_send() || tcp.state() == State::Closed);
    if guest.socket(socket).send_slice(first).is_err() {
        return false;
    }
    let mut got = 0;
    guest.run_until(socket, |tcp| {
        got = got.max(tcp.recv_queue());
        got == first.len() || tcp.state() == State::Closed
    });
    guest.socket(socket).abort();
    guest.poll();
    got == first.len()
}

#[test]
fn a_rule_about_a_name_needs_the_address_and_the_name() {
    let Some(world) = World::make() else { return };
    let engine = world.start();
    let rules = ["allow world.example:80,443", "allow ssh.example:22"];
    let mut guest = engine.attach("sb-1", &policy(Mode::Custom, &rules));
    let good = hello(&["world.example"]);
    // The address was not found through the resolver yet.
    assert!(
        !passes(&mut guest, PUBLIC, 443, &good),
        "an address without a pin"
    );
    assert_eq!(ask(&mut guest, "world.example.").answers.len(), 1);
    assert_eq!(ask(&mut guest, "ssh.example.").answers.len(), 1);
    let http = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").into_bytes();
    let twice = b"GET / HTTP/1.1\r\nHost: world.example\r\nHost: evil.example\r\n\r\n";
    for (what, port, first, open) in [
        ("the right name", 443, good.clone(), true),
        ("another name", 443, hello(&["evil.example"]), false),
        ("no name", 443, hello(&[]), false),
        (
            "two names",
            443,
            hello(&["world.example", "evil.example"]),
            false,
        ),
        ("an address as a name", 443, hello(&["198.51.100.7"]), false),
        (
            "another protocol",
            443,
            b"\x00\x01\x02hello".to_vec(),
            false,
        ),
        ("the right host", 80, http("world.example"), true),
        ("another host", 80, http("evil.example"), false),
        ("two hosts", 80, twice.to_vec(), false),
        ("a port without a rule", ECHO, good.clone(), false),
    ] {
        assert_eq!(passes(&mut guest, PUBLIC, port, &first), open, "{what}");
    }
    assert!(!passes(&mut guest, OTHER, 443, &good), "another address");
    // The server speaks first, so address and port decide.
    let socket = guest.connect(PUBLIC, GREETS);
    guest.run_until(socket, |tcp| tcp.recv_queue() > 0);
    let log = engine.log("sb-1");
    assert!(
        log.iter().any(|entry| entry.reason == Reason::NameMismatch),
        "{log:?}"
    );
}

#[test]
fn two_hundred_guests_do_not_mix() {
    let Some(world) = World::make() else { return };
    let engine = world.start();
    let allow = policy(Mode::Public, &[]);
    let mut guests: Vec<_> = (0..200)
        .map(|number| {
            let mut guest = engine.attach(&format!("sb-{number}"), &allow);
            let socket = guest.connect(PUBLIC, ECHO);
            (guest, socket, format!("token of guest {number}").repeat(50))
        })
        .collect();
    for (guest, socket, token) in &mut guests {
        guest.run_until(*socket, |tcp| tcp.may_send());
        guest.socket(*socket).send_slice(token.as_bytes()).unwrap();
        guest.poll();
    }
    for (guest, socket, token) in &mut guests {
        guest.run_until(*socket, |tcp| tcp.recv_queue() >= token.len());
        let mut got = vec![0; token.len() + 1];
        let len = guest.socket(*socket).recv_slice(&mut got).unwrap();
        assert_eq!(&got[..len], token.as_bytes());
    }
}

#[test]
fn an_engine_without_descriptors_refuses_and_recovers() {
    let Some(world) = World::make() else { return };
    let engine = world.start_with(&["prlimit", "--nofile=48"]);
    let mut guest = engine.attach("sb-1", &policy(Mode::Public, &[]));
    let mut sockets = Vec::new();
    let mut refused = 0;
    for _ in 0..60 {
        let socket = guest.connect(PUBLIC, ECHO);
        guest.run_until(socket, |tcp| tcp.may_send() || tcp.state() == State::Closed);
        match guest.socket(socket).may_send() {
            true => sockets.push(socket),
            false => refused += 1,
        }
    }
    assert!(refused > 0 && !sockets.is_empty(), "{refused} refused");
    assert_eq!(
        engine.log("sb-1").pop().unwrap().reason,
        Reason::Unreachable
    );
    ping(&mut guest, sockets[0]);
    for socket in sockets {
        guest.socket(socket).abort();
    }
    guest.poll();
    let start = std::time::Instant::now();
    while engine.stats("sb-1").open > 0 {
        assert!(start.elapsed().as_secs() < 60);
    }
    let socket = guest.connect(PUBLIC, ECHO);
    guest.run_until(socket, |tcp| tcp.may_send());
    ping(&mut guest, socket);
}

#[test]
fn a_flood_stays_within_its_limits() {
    let Some(world) = World::make() else { return };
    let engine = world.start();
    let limits = NetLimits {
        connections: 16,
        dns_per_second: 5,
        ..NetLimits::default()
    };
    let flooded = Policy::new(Mode::Public, Vec::new(), limits).unwrap();
    let mut guest = engine.attach("sb-1", &flooded);
    let mut quiet = engine.attach("sb-2", &policy(Mode::Public, &[]));
    let socket = quiet.connect(PUBLIC, ECHO);
    quiet.run_until(socket, |tcp| tcp.may_send());
    for _ in 0..1000 {
        guest.connect(PUBLIC, ECHO);
    }
    for port in 0..700 {
        guest.send_datagram(PUBLIC, 20_000 + port, b"spray");
    }
    for _ in 0..50 {
        guest.send_datagram(
            RESOLVER,
            53,
            b"\0\x07\x01\0\0\x01\0\0\0\0\0\0\x01a\0\0\x01\0\x01",
        );
    }
    ping(&mut quiet, socket);
    let stats = engine.stats("sb-1");
    assert!(stats.open <= 16 + 512, "{stats:?}");
    assert!(
        stats.counters.denied > 0 && stats.counters.dns_denied >= 40,
        "{stats:?}"
    );
    engine.done(NetCommand::Reset {
        id: "sb-1".parse().unwrap(),
    });
    assert_eq!(engine.stats("sb-1").open, 0);
    ping(&mut quiet, socket);
}

#[test]
fn a_name_server_that_is_silent_is_reported() {
    let Some(world) = World::make() else { return };
    // An address of the world on which nothing listens, and one that is not there.
    let dead = [
        (OTHER, 53).into(),
        (Ipv4Addr::new(198, 51, 100, 99), 53).into(),
    ];
    let name = world.engine();
    let engine = Engine::start_with(&["ip", "netns", "exec", &name], &dead);
    let mut guest = engine.attach("sb-1", &policy(Mode::Public, &[]));
    let answer = ask(&mut guest, "world.example.");
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
    // The guest still reaches addresses.
    let socket = guest.connect(PUBLIC, ECHO);
    guest.run_until(socket, |tcp| tcp.may_send());
}
