//! Fuzz targets for the network engine: frames of a guest, first bytes of a client, DNS messages, rules.
//!
//! No target sends anything to another address than a socket of its own on the loopback interface.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use forkd_net::dns::{self, Step, Transport};
use forkd_net::policy::{self, Decision, Flow, Said};
use forkd_net::{Context, FRAMES, HostAddresses, Sandbox, SandboxState, peek, wire};
use forkd_types::{Action, DomainName, Group, Mode, NetLimits, Policy, Protocol, Rule, Target};
use rustix::event::{Timespec, epoll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::input::Input;

/// The hardware address of the guest.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const METADATA: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254));
/// Frames of one input.
const MAX_FRAMES: usize = 64;

/// The first bytes of a client. A name that was found is not changed by bytes that follow.
pub(crate) fn first_bytes(data: &[u8]) {
    let whole = peek::peek(data);
    for end in [data.len() / 4, data.len() / 2, data.len().saturating_sub(1)] {
        let part = peek::peek(&data[..end]);
        if let peek::Peeked::Name(_) = part {
            assert!(part == whole, "more bytes changed the name");
        }
    }
}

/// Questions of a guest and answers of a name server.
pub(crate) fn dns_messages(data: &[u8]) {
    let mut input = Input::new(data);
    let kind = input.u8();
    let rest = input.rest();
    let host = HostAddresses::default();
    let rules = vec!["allow a.example:443".parse().expect("a rule")];
    let custom = Policy::new(Mode::Custom, rules, NetLimits::default()).expect("a policy");
    let public = Policy::new(Mode::Public, Vec::new(), NetLimits::default()).expect("a policy");
    for transport in [Transport::Udp, Transport::Tcp] {
        if let Step::Forward { asked, .. } = dns::question(rest, transport, &[], &custom) {
            assert_eq!(
                asked.name().as_str(),
                "a.example",
                "another name was forwarded"
            );
        }
    }
    let transport = match kind & 1 {
        0 => Transport::Udp,
        _ => Transport::Tcp,
    };
    let Step::Forward { message, asked } = dns::question(&question(), transport, &[], &public)
    else {
        panic!("a public name was not forwarded");
    };
    // The number of the question is random: without it no answer would be read.
    let mut answer = rest.to_vec();
    for (to, from) in answer.iter_mut().zip(&message[..2]) {
        *to = *from;
    }
    if let Some(answer) = dns::reply(&answer, &asked, &public, &host) {
        assert!(transport == Transport::Tcp || answer.message.len() <= 1400);
        for (address, _) in answer.addresses {
            assert_eq!(policy::group_of(address, &host), Group::Public);
        }
    }
}

/// A question about the address of `a.example`.
fn question() -> Vec<u8> {
    let mut bytes = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    bytes.extend(b"\x01a\x07example\x00\x00\x01\x00\x01");
    bytes
}

/// Rules as text: each reads back as itself, and none opens a metadata service without naming it.
pub(crate) fn rules(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut rules = Vec::new();
    for line in text.lines().take(8) {
        if let Ok(rule) = line.parse::<Rule>() {
            assert_eq!(rule.to_string().parse::<Rule>().as_ref(), Ok(&rule));
            rules.push(rule);
        }
    }
    let names = rules.iter().any(|rule| {
        let restricted = matches!(rule.target, Target::Group(_) | Target::Range(_));
        rule.action == Action::Allow && restricted
    });
    let Ok(policy) = Policy::new(Mode::Custom, rules, NetLimits::default()) else {
        return;
    };
    let name: DomainName = "a.example".parse().expect("a name");
    for said in [Said::NotYet, Said::Nothing, Said::Hidden, Said::Name(&name)] {
        let flow = Flow {
            address: METADATA,
            port: 80,
            protocol: Protocol::Tcp,
            pins: std::slice::from_ref(&name),
            said,
        };
        let verdict = policy::decide(&[], &policy, &HostAddresses::default(), &flow);
        assert!(names || !matches!(verdict, Decision::Allow(_)));
    }
}

/// A sandbox of the engine, and its guest as a source of frames.
struct Rig {
    sandbox: Sandbox,
    guest: OwnedFd,
    epoll: OwnedFd,
    now: Instant,
    host: HostAddresses,
    buffer: Vec<u8>,
    /// The next byte that each connection expects of the engine.
    expected: [u32; 4],
    id: forkd_types::SandboxId,
}

impl Rig {
    fn new(port: u16) -> Self {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (guest, engine) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a pair");
        let rule = format!("allow 127.0.0.1:{port}/tcp")
            .parse()
            .expect("a rule");
        let limits = NetLimits {
            connections: 3,
            egress_mbit: Some(1),
            ..NetLimits::default()
        };
        let policy = Policy::new(Mode::Custom, vec![rule], limits).expect("a policy");
        let now = Instant::now();
        Self {
            sandbox: Sandbox::new(engine, policy, 1, 0, now),
            guest,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll descriptor"),
            now,
            host: HostAddresses::default(),
            buffer: Vec::new(),
            expected: [0; 4],
            id: "sb-1".parse().expect("an ID"),
        }
    }

    fn with(
        &mut self,
        work: impl FnOnce(&mut Sandbox, &mut Context<'_>) -> SandboxState,
    ) -> SandboxState {
        let mut cx = Context {
            epoll: self.epoll.as_fd(),
            index: 0,
            now: self.now,
            host: &self.host,
            resolvers: &[],
            floor: &[],
            id: &self.id,
            broker: None,
            buffer: &mut self.buffer,
        };
        work(&mut self.sandbox, &mut cx)
    }

    /// Lets the engine work until it has nothing to do.
    fn run(&mut self) {
        let all = epoll::EventFlags::IN | epoll::EventFlags::OUT;
        let mut state = self.with(|sandbox, cx| sandbox.on_ready(FRAMES, all, cx));
        for _ in 0..16 {
            let mut events = Vec::with_capacity(16);
            let none = Timespec::default();
            let room = rustix::buffer::spare_capacity(&mut events);
            let _ = epoll::wait(&self.epoll, room, Some(&none));
            for event in &events {
                let slot = event.data.u64() as u32;
                let flags = event.flags;
                state = self.with(|sandbox, cx| sandbox.on_ready(slot, flags, cx));
            }
            self.read_frames();
            if state != SandboxState::Busy && events.is_empty() {
                break;
            }
            state = self.with(Sandbox::go_on);
        }
    }

    /// Reads what the engine sent, and notes which byte comes next.
    fn read_frames(&mut self) {
        let mut frame = vec![0; wire::MAX_FRAME];
        while let Ok(len @ 1..) = rustix::io::read(&self.guest, &mut frame) {
            let Some(packet) = frame.get(wire::HEADERS..len) else {
                continue;
            };
            let (Some(9..), Some(&6)) = (packet.len().checked_sub(31), packet.get(9)) else {
                continue;
            };
            let port = usize::from(u16::from_be_bytes([packet[22], packet[23]]) & 3);
            let first = u32::from_be_bytes([packet[24], packet[25], packet[26], packet[27]]);
            self.expected[port] = first.wrapping_add(1);
        }
    }
}

/// Frames of a guest: whole ones, and TCP segments that fit to a connection.
pub(crate) fn frames(data: &[u8]) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let mut rig = Rig::new(port);
    let mut input = Input::new(data);
    for _ in 0..MAX_FRAMES {
        if input.is_empty() {
            break;
        }
        let frame = match input.u8() % 4 {
            0 => {
                let len = usize::from(input.u8());
                input.bytes(len).to_vec()
            }
            1 => {
                rig.now += Duration::from_millis(u64::from(input.u16()) * 8);
                let _ = rig.with(Sandbox::tick);
                continue;
            }
            2 => {
                let len = usize::from(input.u8());
                let to =
                    [(Ipv4Addr::LOCALHOST, 53), (wire::GATEWAY, 9)][usize::from(input.u8() & 1)];
                datagram(to.0, to.1, input.bytes(len))
            }
            _ => segment(&mut input, port, &rig.expected),
        };
        let _ = rustix::io::write(&rig.guest, &frame);
        rig.run();
        let stats = rig.sandbox.stats();
        assert!(stats.open <= 3 + 512, "{stats:?}");
    }
    rig.with(|sandbox, cx| {
        sandbox.reset(cx);
        SandboxState::Waiting
    });
    assert_eq!(rig.sandbox.stats().open, 0);
}

/// A frame of the guest around an IPv4 packet.
fn from_guest(mut frame: Vec<u8>, to: Ipv4Addr) -> Vec<u8> {
    frame[wire::VNET + 6..wire::VNET + 12].copy_from_slice(&MAC);
    let packet = &mut frame[wire::HEADERS..];
    packet[12..16].copy_from_slice(&wire::GUEST.octets());
    packet[16..20].copy_from_slice(&to.octets());
    frame
}

fn datagram(to: Ipv4Addr, port: u16, payload: &[u8]) -> Vec<u8> {
    let frame = wire::datagram(wire::GATEWAY_MAC, to, 5000, port, payload).expect("a short one");
    from_guest(frame, to)
}

fn segment(input: &mut Input<'_>, port: u16, expected: &[u32; 4]) -> Vec<u8> {
    let source = u16::from(input.u8() & 3);
    let (to, port) = match input.u8() % 4 {
        0 => (wire::GATEWAY, 80),
        1 => (Ipv4Addr::new(8, 8, 8, 8), 53),
        _ => (Ipv4Addr::LOCALHOST, port),
    };
    let flags = input.u8();
    let sequence = u32::from(input.u16());
    let ack = expected[usize::from(source)].wrapping_add(u32::from(input.u8() % 8));
    let window = input.u16();
    let len = usize::from(input.u8());
    let payload = input.bytes(len);
    let mut frame = wire::ipv4_frame(wire::GATEWAY_MAC, 40 + payload.len());
    let packet = &mut frame[wire::HEADERS..];
    let total = u16::try_from(packet.len()).unwrap_or(0);
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&total.to_be_bytes());
    packet[8..10].copy_from_slice(&[64, 6]);
    packet[20..22].copy_from_slice(&(40_000 + source).to_be_bytes());
    packet[22..24].copy_from_slice(&port.to_be_bytes());
    packet[24..28].copy_from_slice(&sequence.to_be_bytes());
    packet[28..32].copy_from_slice(&ack.to_be_bytes());
    packet[32..34].copy_from_slice(&[0x50, flags]);
    packet[34..36].copy_from_slice(&window.to_be_bytes());
    packet[40..].copy_from_slice(payload);
    from_guest(frame, to)
}
