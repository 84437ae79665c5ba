//! The network of one sandbox: its frame socket, flows, policy and counters.
//!
//! [`Sandbox::on_ready`] and [`Sandbox::tick`] are the only entries for events. Each host socket has a slot; the slot
//! number is part of the token that epoll returns. A stale event for a slot that was used again is harmless: every
//! operation asks the kernel and takes "not now" for an answer.

mod brokered;
mod datagrams;
mod local;
mod questions;
mod segments;
mod turns;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use forkd_net_proto::{FlowRecord, MAX_ENTRIES, NetCounters, NetStats, OpenFlow, Reason, Verdict};
use forkd_types::{DomainName, HostPort, Policy, Protocol, Rule, SandboxId};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::HostAddresses;
use crate::dns::Pins;
use crate::limit::Bucket;
use crate::log::FlowLog;
use crate::out::FrameOut;
use crate::policy::{self, Decision, Flow, Said};
use crate::udp::{DnsQuery, UdpFlow};
use crate::wire::{self, Frame, Packet};
use local::LocalStream;
use segments::TcpFlow;
use turns::ByteTurns;

/// Frames that are read in one turn.
const FRAMES_PER_TURN: usize = 256;
/// Denials that the controller hears of by itself.
const NOTICES_PER_SECOND: u32 = 1;
/// The slot of the frame socket in a token.
pub const FRAMES: u32 = u32::MAX;

/// The part of its worker that a sandbox needs.
pub struct Context<'a> {
    pub epoll: BorrowedFd<'a>,
    /// The number of the sandbox, for tokens.
    pub index: u32,
    pub now: Instant,
    pub host: &'a HostAddresses,
    pub resolvers: &'a [SocketAddr],
    /// The rules of the operator.
    pub floor: &'a [Rule],
    pub id: &'a SandboxId,
    /// The link to the broker of secrets.
    pub broker: Option<BorrowedFd<'a>>,
    /// Room for the largest frame.
    pub buffer: &'a mut Vec<u8>,
}

/// How a sandbox stands after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    Waiting,
    /// More is to be done at once.
    Busy,
    /// The VMM closed its end.
    Closed,
}

/// Identifies a flow of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    protocol: Protocol,
    source_port: u16,
    to: Ipv4Addr,
    port: u16,
}

enum Slot {
    Free,
    Tcp(Box<TcpFlow>),
    Udp(Box<UdpFlow>),
    Dns(Box<DnsQuery>),
    Local(Box<LocalStream>),
}

/// The network of one sandbox.
pub struct Sandbox {
    out: FrameOut,
    mac: [u8; 6],
    policy: Policy,
    /// Hosts that are reached through the broker of secrets only.
    brokered: Vec<HostPort>,
    generation: u64,
    slots: Vec<Slot>,
    free: Vec<u32>,
    flows: HashMap<Key, u32>,
    tcp_flows: u32,
    udp_flows: u32,
    questions: u32,
    local_streams: u32,
    /// Flows with work that waits for the frame socket or for their next turn.
    busy: Vec<u32>,
    pins: Pins,
    log: FlowLog,
    counters: NetCounters,
    new_flows: Bucket,
    dns: Bucket,
    bytes: ByteTurns,
    notices: Bucket,
    notice: Option<Notice>,
    /// Denials without a notice since the last one.
    suppressed: u64,
}

/// News of a denied flow for the controller.
#[derive(Debug, Clone)]
pub struct Notice {
    pub flow: FlowRecord,
    /// Denials before this one that had no notice.
    pub suppressed: u64,
}

impl Sandbox {
    /// Serves the guest at the other end of the socket, which has sent `spent` bytes before.
    pub fn new(socket: OwnedFd, policy: Policy, generation: u64, spent: u64, now: Instant) -> Self {
        let limits = *policy.limits();
        Self {
            out: FrameOut::new(socket),
            mac: [0xff; 6],
            policy,
            brokered: Vec::new(),
            generation,
            slots: Vec::new(),
            free: Vec::new(),
            flows: HashMap::new(),
            tcp_flows: 0,
            udp_flows: 0,
            questions: 0,
            local_streams: 0,
            busy: Vec::new(),
            pins: Pins::default(),
            log: FlowLog::default(),
            counters: NetCounters::default(),
            new_flows: Bucket::new(limits.new_per_second, now),
            dns: Bucket::new(limits.dns_per_second, now),
            bytes: ByteTurns::new(&limits, spent, now),
            notices: Bucket::new(NOTICES_PER_SECOND, now),
            notice: None,
            suppressed: 0,
        }
    }

    /// News of a denial, if there is any and the last is long enough ago.
    pub fn take_notice(&mut self) -> Option<Notice> {
        self.notice.take()
    }

    /// The frame socket.
    pub fn frames(&self) -> BorrowedFd<'_> {
        self.out.as_fd()
    }

    /// Some host socket is open, so that time matters.
    pub fn has_timers(&self) -> bool {
        self.free.len() < self.slots.len()
    }

    /// A descriptor of this sandbox is ready.
    pub fn on_ready(&mut self, slot: u32, flags: epoll::EventFlags, cx: &mut Context<'_>) -> After {
        if slot != FRAMES {
            match self.slots.get(slot as usize) {
                Some(Slot::Tcp(_)) => self.tcp_ready(slot, flags, cx),
                Some(Slot::Udp(_)) => self.udp_ready(slot, cx),
                Some(Slot::Dns(_)) => self.dns_ready(slot, cx),
                Some(Slot::Local(_) | Slot::Free) | None => {}
            }
            return self.rest();
        }
        if flags.intersects(epoll::EventFlags::OUT) && self.out.flush() {
            self.serve_busy(cx);
        }
        self.read_frames(cx)
    }

    /// When flows that wait for a rate go on.
    pub fn wakes_at(&self) -> Option<Instant> {
        self.bytes.wakes_at()
    }

    /// Bytes that the guest has sent in all, also before it was attached.
    pub fn spent(&self) -> u64 {
        self.bytes.sent(self.counters.bytes_up)
    }

    /// Goes on with work that was put off.
    pub fn go_on(&mut self, cx: &mut Context<'_>) -> After {
        self.serve_waiting(cx);
        self.serve_busy(cx);
        self.read_frames(cx)
    }

    fn rest(&self) -> After {
        match self.busy.is_empty() || !self.out.is_open() {
            true => After::Waiting,
            false => After::Busy,
        }
    }

    fn serve_busy(&mut self, cx: &mut Context<'_>) {
        for slot in std::mem::take(&mut self.busy) {
            self.serve_tcp(slot, cx);
        }
    }

    fn read_frames(&mut self, cx: &mut Context<'_>) -> After {
        let mut buffer = std::mem::take(cx.buffer);
        buffer.resize(wire::MAX_FRAME, 0);
        let mut after = After::Busy;
        for _ in 0..FRAMES_PER_TURN {
            match recv(&self.out, &mut buffer[..], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => {
                    after = After::Closed;
                    break;
                }
                Ok((_, len)) => self.frame(buffer.get(..len).unwrap_or_default(), cx),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    after = self.rest();
                    break;
                }
                Err(_) => {
                    after = After::Closed;
                    break;
                }
            }
        }
        *cx.buffer = buffer;
        after
    }

    /// Takes one frame of the guest.
    fn frame(&mut self, bytes: &[u8], cx: &mut Context<'_>) {
        self.counters.frames_up += 1;
        let Some(Frame { source, packet }) = wire::parse(bytes) else {
            self.counters.frames_dropped += 1;
            return;
        };
        self.mac = source;
        match packet {
            Packet::ArpRequest { sender } => self.out.send(wire::arp_reply(source, sender)),
            Packet::Tcp(segment) => self.segment(&segment, cx),
            Packet::Udp(datagram) => self.datagram(&datagram, cx),
            Packet::Echo { to, packet } => {
                let answer = match to == wire::GATEWAY {
                    true => wire::echo_reply(source, to, packet),
                    // Administratively prohibited.
                    false => wire::unreachable(source, wire::GATEWAY, 13, packet),
                };
                self.send(answer);
            }
        }
    }

    fn send(&mut self, frame: Option<Vec<u8>>) {
        if let Some(frame) = frame {
            self.out.send(frame);
        }
    }

    /// Ends what takes too long and sends what is due.
    pub fn tick(&mut self, cx: &mut Context<'_>) -> After {
        for slot in 0..u32::try_from(self.slots.len()).unwrap_or(0) {
            match self.slots.get(slot as usize) {
                Some(Slot::Tcp(_)) => self.tcp_tick(slot, cx),
                Some(Slot::Udp(_)) => self.udp_tick(slot, cx),
                Some(Slot::Dns(_)) => self.dns_tick(slot, cx),
                Some(Slot::Local(_)) => self.local_tick(slot, cx),
                Some(Slot::Free) | None => {}
            }
        }
        self.rest()
    }

    /// Puts a policy in force. Flows that it does not allow end.
    pub fn set_policy(&mut self, policy: Policy, generation: u64, cx: &mut Context<'_>) {
        let limits = *policy.limits();
        self.policy = policy;
        self.generation = generation;
        self.new_flows = Bucket::new(limits.new_per_second, cx.now);
        self.dns = Bucket::new(limits.dns_per_second, cx.now);
        self.bytes.set(&limits, cx.now);
        self.judge_again(cx);
    }

    /// Ends the flows that the rules in force do not allow.
    pub fn judge_again(&mut self, cx: &mut Context<'_>) {
        let open: Vec<(Key, u32)> = self.flows.iter().map(|(key, slot)| (*key, *slot)).collect();
        for (key, slot) in open {
            // The engine answers such a stream itself, under the policy of each question.
            if let Some(Slot::Local(_)) = self.slots.get(slot as usize) {
                continue;
            }
            let (said, name) = match self.slots.get(slot as usize) {
                Some(Slot::Tcp(flow)) => (flow.said(), flow.name()),
                _ => (None, None),
            };
            let said = match (&said, &name) {
                (Some(_), Some(name)) => Said::Name(name),
                (Some(said), None) => *said,
                (None, _) => Said::NotYet,
            };
            let stays = self.stays_where_it_is(slot);
            match self.decide(key, said, cx) {
                Decision::Deny(reason) => self.cut(slot, reason, cx),
                _ if !stays => self.cut(slot, Reason::SecretHost, cx),
                // What the client said first is gone, so such a flow has to prove itself again.
                Decision::Undecided if key.protocol == Protocol::Tcp => {
                    self.cut(slot, Reason::NameMismatch, cx)
                }
                Decision::Allow(_) | Decision::Undecided => {}
            }
        }
    }

    /// Ends every flow. The guest gets a reset for each connection. A guest that was rolled back may not accept one with
    /// the sequence number of later; its next segment is answered with a reset that it accepts.
    pub fn reset(&mut self, cx: &mut Context<'_>) {
        for slot in 0..u32::try_from(self.slots.len()).unwrap_or(0) {
            self.break_tcp(slot, cx);
            self.close(slot, cx);
        }
        self.busy.clear();
    }

    pub fn stats(&self) -> NetStats {
        NetStats {
            generation: self.generation,
            counters: self.counters(),
            open: self.tcp_flows + self.udp_flows,
        }
    }

    pub fn counters(&self) -> NetCounters {
        NetCounters {
            frames_down: self.out.sent,
            frames_dropped: self.counters.frames_dropped + self.out.dropped,
            ..self.counters
        }
    }

    /// Entries of the log after a number, and how many are gone.
    pub fn log_after(&self, number: u64) -> (Vec<FlowRecord>, u64) {
        self.log.after(number)
    }

    /// The number of the newest entry of the log.
    pub fn last_entry(&self) -> u64 {
        self.log.last()
    }

    /// Open flows, at most [`MAX_ENTRIES`], and their number.
    pub fn open_flows(&self, now: Instant) -> (Vec<OpenFlow>, u32) {
        let age = |started: Instant| millis(now.saturating_duration_since(started));
        let flows = self.slots.iter().filter_map(|slot| match slot {
            Slot::Tcp(flow) => Some(OpenFlow {
                protocol: Protocol::Tcp,
                address: flow.key.to.into(),
                port: flow.key.port,
                name: flow.name().map(|name| name.to_string()),
                up: flow.moved.up,
                down: flow.moved.down,
                age_ms: age(flow.started),
            }),
            Slot::Udp(flow) => Some(OpenFlow {
                protocol: Protocol::Udp,
                address: flow.to.into(),
                port: flow.port,
                name: flow.name.clone(),
                up: flow.up,
                down: flow.down,
                age_ms: age(flow.started),
            }),
            Slot::Dns(_) | Slot::Local(_) | Slot::Free => None,
        });
        (
            flows.take(MAX_ENTRIES).collect(),
            self.tcp_flows + self.udp_flows,
        )
    }

    fn decide(&self, key: Key, said: Said<'_>, cx: &Context<'_>) -> Decision {
        let pins = self.pins.of(key.to.into(), cx.now);
        let flow = Flow {
            address: key.to.into(),
            port: key.port,
            protocol: key.protocol,
            pins: &pins,
            said,
        };
        policy::decide(cx.floor, &self.policy, cx.host, &flow)
    }

    /// The name by which the guest most likely found an address.
    fn pinned(&self, address: Ipv4Addr, now: Instant) -> Option<DomainName> {
        self.pins.of(address.into(), now).pop()
    }

    /// Counts and records a flow that is not allowed.
    fn note_denied(&mut self, key: Key, name: Option<String>, reason: Reason, cx: &Context<'_>) {
        self.counters.denied += 1;
        self.log_denied(key, name, reason, cx);
    }

    /// Records a denial, and prepares a notice unless the last one is too recent.
    fn log_denied(&mut self, key: Key, name: Option<String>, reason: Reason, cx: &Context<'_>) {
        let flow = self.log.add(FlowRecord {
            number: 0,
            unix_ms: 0,
            generation: self.generation,
            protocol: key.protocol,
            address: key.to.into(),
            port: key.port,
            name,
            verdict: Verdict::Denied,
            reason,
            up: 0,
            down: 0,
            duration_ms: 0,
        });
        if reason == Reason::Unreachable {
            // No policy denied it.
            return;
        }
        if self.notices.take(cx.now) {
            let suppressed = std::mem::take(&mut self.suppressed);
            let flow = flow.clone();
            self.notice = Some(Notice { flow, suppressed });
        } else {
            self.suppressed += 1;
        }
    }

    /// Puts a flow or question into a slot and listens to its host socket.
    fn occupy(&mut self, slot: Slot, cx: &Context<'_>) -> Result<u32, Errno> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot::Free);
                u32::try_from(self.slots.len() - 1).unwrap_or(0)
            }
        };
        let socket = match &slot {
            Slot::Tcp(flow) => Some(flow.host.fd.as_fd()),
            Slot::Udp(flow) => Some(flow.socket.as_fd()),
            Slot::Dns(query) => Some(query.socket.as_fd()),
            Slot::Local(_) | Slot::Free => None,
        };
        if let Some(socket) = socket
            && let Err(error) = epoll::add(cx.epoll, socket, token(cx.index, index), READINESS)
        {
            self.free.push(index);
            return Err(error);
        }
        match &slot {
            Slot::Tcp(_) => self.tcp_flows += 1,
            Slot::Udp(_) => self.udp_flows += 1,
            Slot::Dns(_) => self.questions += 1,
            Slot::Local(_) => self.local_streams += 1,
            Slot::Free => {}
        }
        if let Some(place) = self.slots.get_mut(index as usize) {
            *place = slot;
        }
        Ok(index)
    }

    /// Ends a flow or question. Dropping the socket takes it off the epoll descriptor.
    fn close(&mut self, slot: u32, cx: &Context<'_>) {
        let Some(place) = self.slots.get_mut(slot as usize) else {
            return;
        };
        let (record, key) = match std::mem::replace(place, Slot::Free) {
            Slot::Free => return,
            Slot::Dns(_) => {
                self.questions -= 1;
                (None, None)
            }
            Slot::Local(stream) => {
                self.local_streams -= 1;
                (None, Some(stream.key))
            }
            Slot::Tcp(flow) => {
                self.tcp_flows -= 1;
                if self.tcp_flows == 0 {
                    self.out.shrink();
                }
                (flow.record(cx.now), Some(flow.key))
            }
            Slot::Udp(flow) => {
                self.udp_flows -= 1;
                (
                    Some(datagrams::record(&flow, cx.now)),
                    Some(datagrams::key(&flow)),
                )
            }
        };
        self.free.push(slot);
        if let Some(key) = key {
            self.flows.remove(&key);
        }
        if let Some(mut record) = record {
            record.generation = self.generation;
            self.log.add(record);
        }
    }
}

/// Everything that a relay waits for, edge-triggered.
const READINESS: epoll::EventFlags = epoll::EventFlags::IN
    .union(epoll::EventFlags::OUT)
    .union(epoll::EventFlags::RDHUP)
    .union(epoll::EventFlags::ET);

/// The token of a slot of a sandbox.
fn token(sandbox: u32, slot: u32) -> epoll::EventData {
    epoll::EventData::new_u64(u64::from(sandbox) << 32 | u64::from(slot))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl AsFd for Sandbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.frames()
    }
}
