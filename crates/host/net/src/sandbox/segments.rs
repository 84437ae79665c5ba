//! TCP of a guest.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use forkd_net_proto::{FlowRecord, Reason, Verdict};
use forkd_types::{DomainName, Protocol};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use super::brokered::Way;
use super::local::Service;
use super::{Context, Key, Sandbox, Slot, millis};
use crate::peek::{self, Peeked};
use crate::policy::{Decision, Said};
use crate::tcp::{GuestTcp, HostSocket, Moved, Relay, Smoltcp, TURN, relay};
use crate::wire::{self, Segment};

const CONNECT_TIME: Duration = Duration::from_secs(30);
/// How long a client may take for its first bytes if the policy depends on them.
const PEEK_TIME: Duration = Duration::from_secs(5);
const IDLE: Duration = Duration::from_secs(2 * 3600);
/// The first byte of TLS.
const TLS: u8 = 0x16;
/// Ports on which the client always speaks first.
const CLIENT_FIRST: [u16; 2] = [80, 443];

/// A TCP connection of the guest.
pub struct TcpFlow {
    pub key: Key,
    pub host: HostSocket,
    pub started: Instant,
    pub moved: Moved,
    used: Instant,
    reason: Reason,
    phase: Phase,
    claim: Option<Claim>,
    pinned: Option<DomainName>,
    /// The flow waits for the rate of the sandbox.
    waits: bool,
    /// The other end of the host socket is the broker of secrets.
    pub is_brokered: bool,
    /// The first bytes decide, also if the policy allows the address.
    peeks: bool,
}

enum Phase {
    /// The host socket is not connected; the guest's SYN waits.
    Connecting {
        syn: Vec<u8>,
        mss: u16,
    },
    /// Connected; the verdict waits for the first bytes.
    Peeking {
        guest: Box<Smoltcp>,
        since: Instant,
    },
    Open {
        guest: Box<Smoltcp>,
    },
}

/// The statement of the client in its first bytes.
#[derive(Debug, Clone)]
enum Claim {
    Nothing,
    Hidden,
    Name(DomainName),
}

impl TcpFlow {
    /// The statement of the client, if the verdict depended on it; a name is in [`TcpFlow::name`].
    pub fn said(&self) -> Option<Said<'static>> {
        self.claim.as_ref().map(|claim| match claim {
            Claim::Hidden => Said::Hidden,
            Claim::Nothing | Claim::Name(_) => Said::Nothing,
        })
    }

    /// The name that the client said, or else the one by which it found the address.
    pub fn name(&self) -> Option<DomainName> {
        match &self.claim {
            Some(Claim::Name(name)) => Some(name.clone()),
            Some(_) => None,
            None => self.pinned.clone(),
        }
    }

    /// Bytes may go both ways.
    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open { .. })
    }

    /// Makes the kernel send a reset to the peer when the socket is closed.
    pub fn break_host_socket(&self) {
        let _ = sockopt::set_socket_linger(&self.host.fd, Some(Duration::ZERO));
    }

    /// The entry for the log. A flow that never connected has an entry of its own already.
    pub fn record(&self, now: Instant) -> Option<FlowRecord> {
        if matches!(self.phase, Phase::Connecting { .. }) {
            return None;
        }
        Some(FlowRecord {
            number: 0,
            unix_ms: 0,
            generation: 0,
            protocol: Protocol::Tcp,
            address: self.key.to.into(),
            port: self.key.port,
            name: self.name().map(|name| name.to_string()),
            verdict: Verdict::Allowed,
            reason: self.reason,
            up: self.moved.up,
            down: self.moved.down,
            duration_ms: millis(now.saturating_duration_since(self.started)),
        })
    }

    fn guest(&mut self) -> Option<&mut Smoltcp> {
        match &mut self.phase {
            Phase::Connecting { .. } => None,
            Phase::Peeking { guest, .. } | Phase::Open { guest } => Some(guest),
        }
    }
}

/// Starts to connect a host socket.
pub(super) fn dial(to: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = match to.ip() {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    let _ = sockopt::set_tcp_nodelay(&socket, true);
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// Buffers shrink as connections grow, so that the memory of a sandbox is bounded.
fn buffer_size(flows: u32) -> usize {
    match flows {
        0..=32 => 256 * 1024,
        33..=256 => 64 * 1024,
        _ => 16 * 1024,
    }
}

impl Sandbox {
    pub(super) fn segment(&mut self, segment: &Segment<'_>, cx: &mut Context<'_>) {
        let key = Key {
            protocol: Protocol::Tcp,
            source_port: segment.source_port,
            to: segment.to,
            port: segment.port,
        };
        let known = self.flows.get(&key).copied();
        match known {
            Some(slot) if matches!(self.slots.get(slot as usize), Some(Slot::Local(_))) => {
                self.continue_local(slot, segment, cx);
            }
            Some(slot) => self.continue_tcp(slot, segment, cx),
            None if segment.syn && !segment.ack && !segment.rst => match Service::at(&key) {
                Some(service) => self.open_local(key, service, segment, cx),
                None => self.open_tcp(key, segment, cx),
            },
            None => {
                // A connection of before a fork, a roll-back or a restart.
                self.counters.resets += 1;
                self.send(wire::reset_for(self.mac, segment));
            }
        }
    }

    fn open_tcp(&mut self, key: Key, segment: &Segment<'_>, cx: &mut Context<'_>) {
        let pinned = self.pinned(key.to, cx.now);
        let peeks = self.must_peek(&key);
        let verdict = match self.decide(key, Said::NotYet, cx) {
            Decision::Deny(reason) => Err(reason),
            _ if self.bytes.is_over(self.counters.bytes_up) => Err(Reason::Quota),
            Decision::Allow(_) | Decision::Undecided
                if self.tcp_flows >= self.policy.limits().connections
                    || !self.new_flows.take(cx.now) =>
            {
                Err(Reason::Limit)
            }
            Decision::Allow(reason) => Ok(reason),
            Decision::Undecided => Ok(Reason::NameMismatch),
        };
        let opened = verdict.and_then(|reason| {
            let fd = dial((key.to, key.port).into()).map_err(|_| Reason::Unreachable)?;
            let mut syn = segment.packet.to_vec();
            let mss = wire::raise_mss(&mut syn);
            Ok(TcpFlow {
                key,
                host: HostSocket {
                    fd,
                    readable: false,
                    writable: false,
                    ended: false,
                    finished: false,
                },
                started: cx.now,
                moved: Moved::default(),
                used: cx.now,
                reason,
                phase: Phase::Connecting { syn, mss },
                claim: None,
                pinned: pinned.clone(),
                waits: false,
                is_brokered: false,
                peeks,
            })
        });
        let occupied = opened.and_then(|flow| {
            self.occupy(Slot::Tcp(Box::new(flow)), cx)
                .map_err(|_| Reason::Unreachable)
        });
        match occupied {
            Ok(slot) => {
                self.flows.insert(key, slot);
            }
            Err(reason) => {
                self.note_denied(key, pinned.map(|name| name.to_string()), reason, cx);
                self.send(wire::reset_for(self.mac, segment));
            }
        }
    }

    fn continue_tcp(&mut self, slot: u32, segment: &Segment<'_>, cx: &mut Context<'_>) {
        let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        flow.used = cx.now;
        if let Phase::Connecting { .. } = flow.phase {
            // A repeated SYN: the answer is on its way. Any other segment ends the attempt.
            if !segment.syn || segment.rst {
                self.close(slot, cx);
            }
            return;
        }
        let (mac, out) = (self.mac, &mut self.out);
        if let Some(guest) = flow.guest() {
            guest.input(segment.packet, out, mac, cx.now);
        }
        self.serve_tcp(slot, cx);
    }

    pub(super) fn tcp_ready(&mut self, slot: u32, flags: epoll::EventFlags, cx: &mut Context<'_>) {
        let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        use epoll::EventFlags as F;
        if let Phase::Connecting { .. } = flow.phase {
            if flags.intersects(F::OUT | F::ERR | F::HUP) {
                self.connected(slot, cx);
            }
            return;
        }
        flow.host.readable |= flags.intersects(F::IN | F::RDHUP | F::HUP | F::ERR);
        flow.host.writable |= flags.intersects(F::OUT | F::ERR);
        flow.used = cx.now;
        self.serve_tcp(slot, cx);
    }

    /// The host socket is connected, or is not going to be.
    fn connected(&mut self, slot: u32, cx: &mut Context<'_>) {
        let (mac, buffer) = (self.mac, buffer_size(self.tcp_flows));
        let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        let error = sockopt::socket_error(&flow.host.fd);
        if !matches!(error, Ok(Ok(()))) {
            self.refuse(slot, Reason::Unreachable, cx);
            return;
        }
        let undecided = flow.reason == Reason::NameMismatch || flow.peeks;
        let key = flow.key;
        let Phase::Connecting { syn, mss } = &flow.phase else {
            return;
        };
        let mut guest = Box::new(Smoltcp::new(key.to, key.port, *mss, buffer, cx.now));
        guest.input(syn, &mut self.out, mac, cx.now);
        flow.phase = match undecided {
            true => Phase::Peeking {
                guest,
                since: cx.now,
            },
            false => Phase::Open { guest },
        };
        flow.host.writable = true;
        flow.host.readable = true;
        if !undecided {
            self.counters.flows += 1;
        }
        self.serve_tcp(slot, cx);
    }

    /// Answers a SYN that waits with a reset.
    fn refuse(&mut self, slot: u32, reason: Reason, cx: &mut Context<'_>) {
        let Some(Slot::Tcp(flow)) = self.slots.get(slot as usize) else {
            return;
        };
        let (key, name) = (flow.key, flow.name().map(|name| name.to_string()));
        if let Phase::Connecting { syn, .. } = &flow.phase {
            let segment = Segment {
                packet: syn,
                source_port: key.source_port,
                to: key.to,
                port: key.port,
                syn: true,
                ack: false,
                rst: false,
            };
            let reset = wire::reset_for(self.mac, &segment);
            self.send(reset);
        }
        self.close(slot, cx);
        self.note_denied(key, name, reason, cx);
    }

    /// Breaks a connection of either phase, and records why.
    pub(super) fn cut(&mut self, slot: u32, reason: Reason, cx: &mut Context<'_>) {
        let Some(Slot::Tcp(flow)) = self.slots.get(slot as usize) else {
            self.close(slot, cx);
            return;
        };
        if matches!(flow.phase, Phase::Connecting { .. }) {
            self.refuse(slot, reason, cx);
            return;
        }
        let (key, name) = (flow.key, flow.name().map(|name| name.to_string()));
        self.break_tcp(slot, cx);
        self.close(slot, cx);
        self.note_denied(key, name, reason, cx);
    }

    /// Sends a reset to both ends of a connection. The flow itself stays until it is closed.
    pub(super) fn break_tcp(&mut self, slot: u32, cx: &Context<'_>) {
        let mac = self.mac;
        let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        if let Some(guest) = flow.guest() {
            guest.abort();
            guest.poll(&mut self.out, mac, cx.now);
        }
        flow.break_host_socket();
    }

    /// Moves bytes, sends what is due, and ends the connection if both sides did.
    pub(super) fn serve_tcp(&mut self, slot: u32, cx: &mut Context<'_>) {
        if !self.peek(slot, cx) {
            return;
        }
        let mac = self.mac;
        let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        let Phase::Open { guest } = &mut flow.phase else {
            return;
        };
        let allowed = self.bytes.turn(self.counters.bytes_up, cx.now);
        let (relayed, moved) = relay(guest.as_mut(), &mut flow.host, allowed);
        guest.poll(&mut self.out, mac, cx.now);
        flow.moved.add(moved);
        self.counters.bytes_up += moved.up;
        self.counters.bytes_down += moved.down;
        self.bytes.spent(moved);
        let closed = guest.is_closed();
        let over = self.bytes.is_over(self.counters.bytes_up) && guest.has_bytes();
        match relayed {
            Relay::Done => self.close(slot, cx),
            Relay::Broken => {
                flow.break_host_socket();
                self.close(slot, cx);
            }
            _ if over => self.cut(slot, Reason::Quota, cx),
            // Polling may have sent the last segment.
            Relay::Waiting if closed => self.busy.push(slot),
            Relay::Busy if allowed.up < TURN || allowed.down < TURN => {
                if !std::mem::replace(&mut flow.waits, true) {
                    self.counters.limited += 1;
                    self.bytes.wait(slot, cx.now);
                }
            }
            Relay::Busy => self.busy.push(slot),
            Relay::Waiting if !self.out.is_open() => self.busy.push(slot),
            Relay::Waiting => {}
        }
    }

    /// Serves flows that waited for a rate, and first the one that waited longest.
    pub(super) fn serve_waiting(&mut self, cx: &mut Context<'_>) {
        for slot in self.bytes.due(cx.now) {
            if let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) {
                flow.waits = false;
                self.serve_tcp(slot, cx);
            }
        }
        self.bytes.served(cx.now);
    }

    /// Looks at the first bytes if the verdict depends on them. False if the flow is not open.
    fn peek(&mut self, slot: u32, cx: &mut Context<'_>) -> bool {
        let mac = self.mac;
        let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) else {
            return false;
        };
        let Phase::Peeking { guest, .. } = &mut flow.phase else {
            return matches!(flow.phase, Phase::Open { .. });
        };
        let bytes = guest.first_bytes(peek::MAX_FIRST_BYTES);
        guest.poll(&mut self.out, mac, cx.now);
        if guest.is_closed() {
            self.close(slot, cx);
            return false;
        }
        let peeked = peek::peek(&bytes);
        let tls = bytes.first() == Some(&TLS);
        let claim = match &peeked {
            Peeked::Name(name) => Claim::Name(name.clone()),
            Peeked::Hidden => Claim::Hidden,
            // On these ports another protocol could hide the name.
            Peeked::Other if CLIENT_FIRST.contains(&flow.key.port) => Claim::Hidden,
            Peeked::Other => Claim::Nothing,
            Peeked::More if guest.is_read_to_end() => Claim::Hidden,
            Peeked::More => {
                let server_first = bytes.is_empty()
                    && !CLIENT_FIRST.contains(&flow.key.port)
                    && has_bytes(&flow.host.fd);
                if !server_first {
                    return false;
                }
                Claim::Nothing
            }
        };
        let key = flow.key;
        let said = match &claim {
            Claim::Nothing => Said::Nothing,
            Claim::Hidden => Said::Hidden,
            Claim::Name(name) => Said::Name(name),
        };
        let decision = self.decide(key, said, cx);
        let way = self.way(&key, &peeked, tls, cx);
        let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) else {
            return false;
        };
        flow.claim = Some(claim.clone());
        match decision {
            Decision::Allow(_) if way == Way::Refused => {
                self.cut(slot, Reason::SecretHost, cx);
                false
            }
            Decision::Allow(reason) => {
                flow.reason = reason;
                let taken = std::mem::replace(
                    &mut flow.phase,
                    Phase::Connecting {
                        syn: Vec::new(),
                        mss: 0,
                    },
                );
                if let Phase::Peeking { guest, .. } = taken {
                    flow.phase = Phase::Open { guest };
                }
                self.counters.flows += 1;
                if let (Way::Broker, Claim::Name(name)) = (way, &claim)
                    && let Err(reason) = self.hand_over(slot, name, cx)
                {
                    self.cut(slot, reason, cx);
                    return false;
                }
                true
            }
            Decision::Deny(reason) => {
                self.cut(slot, reason, cx);
                false
            }
            Decision::Undecided => {
                self.cut(slot, Reason::NameMismatch, cx);
                false
            }
        }
    }

    pub(super) fn tcp_tick(&mut self, slot: u32, cx: &mut Context<'_>) {
        let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        let since = |start: Instant| cx.now.saturating_duration_since(start);
        let late = match &flow.phase {
            Phase::Connecting { .. } if since(flow.started) > CONNECT_TIME => {
                Some(Reason::Unreachable)
            }
            Phase::Peeking { since: start, .. } if since(*start) > PEEK_TIME => {
                Some(Reason::NameMismatch)
            }
            Phase::Open { .. } if since(flow.used) > IDLE => Some(Reason::Unreachable),
            _ => None,
        };
        if let Some(reason) = late {
            self.cut(slot, reason, cx);
            return;
        }
        let due = flow
            .guest()
            .and_then(|guest| guest.wake_at())
            .is_some_and(|wake| wake <= cx.now);
        if due {
            self.serve_tcp(slot, cx);
        }
    }
}

/// The peer sent bytes, or ended.
fn has_bytes(socket: &OwnedFd) -> bool {
    use rustix::net::{RecvFlags, recv};
    let mut byte = [0; 1];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    !matches!(
        recv(socket.as_fd(), &mut byte, flags),
        Err(Errno::AGAIN | Errno::INTR)
    )
}
