//! UDP of a guest: relayed datagrams, and questions to the resolver.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use forkd_net_proto::{FlowRecord, Reason, Verdict};
use forkd_types::{DomainName, Protocol};

use super::{Context, Key, Sandbox, Slot, millis};
use crate::dns::{self, Step};
use crate::policy::{Decision, Said};
use crate::udp::{self, DnsQuery, UdpFlow};
use crate::wire::{self, Datagram};

const DNS_PORT: u16 = 53;
/// UDP flows open at one time.
const MAX_UDP: u32 = 512;
/// Questions that wait for an answer at one time.
const MAX_QUESTIONS: u32 = 256;
const IDLE: Duration = Duration::from_secs(60);
/// How long a name server may take before the next one is asked.
const SERVER_TIME: Duration = Duration::from_millis(1500);
/// ICMP code: port unreachable. Clients give up at once, as they do for a closed port.
const PORT_UNREACHABLE: u8 = 3;
/// Datagrams that are read in one turn.
const PER_TURN: usize = 64;

pub(super) fn key(flow: &UdpFlow) -> Key {
    Key {
        protocol: Protocol::Udp,
        source_port: flow.source_port,
        to: flow.to,
        port: flow.port,
    }
}

pub(super) fn record(flow: &UdpFlow, now: Instant) -> FlowRecord {
    FlowRecord {
        number: 0,
        unix_ms: 0,
        generation: 0,
        protocol: Protocol::Udp,
        address: flow.to.into(),
        port: flow.port,
        name: flow.name.clone(),
        verdict: Verdict::Allowed,
        reason: flow.reason,
        up: flow.up,
        down: flow.down,
        duration_ms: millis(now.saturating_duration_since(flow.started)),
    }
}

impl Sandbox {
    pub(super) fn datagram(&mut self, datagram: &Datagram<'_>, cx: &mut Context<'_>) {
        if datagram.port == DNS_PORT {
            self.question(datagram, cx);
            return;
        }
        let key = Key {
            protocol: Protocol::Udp,
            source_port: datagram.source_port,
            to: datagram.to,
            port: datagram.port,
        };
        let slot = match self.flows.get(&key) {
            Some(slot) => Some(*slot),
            None => self.open_udp(key, cx),
        };
        let sent = match slot.and_then(|slot| self.slots.get_mut(slot as usize)) {
            Some(Slot::Udp(flow)) => {
                flow.used = cx.now;
                flow.up += datagram.payload.len() as u64;
                self.counters.bytes_up += datagram.payload.len() as u64;
                udp::put(&flow.socket, datagram.payload).is_ok()
            }
            _ => false,
        };
        if !sent {
            self.send(wire::unreachable(
                self.mac,
                datagram.to,
                PORT_UNREACHABLE,
                datagram.packet,
            ));
        }
    }

    fn open_udp(&mut self, key: Key, cx: &mut Context<'_>) -> Option<u32> {
        let name = self.pinned(key.to, cx.now).map(|name| name.to_string());
        let reason = match self.decide(key, Said::NotYet, cx) {
            // A name of UDP is never undecided.
            Decision::Deny(reason) => Err(reason),
            Decision::Undecided => Err(Reason::NameMismatch),
            Decision::Allow(_) if self.udp_flows >= MAX_UDP || !self.new_flows.take(cx.now) => {
                Err(Reason::Limit)
            }
            Decision::Allow(reason) => Ok(reason),
        };
        let opened = match reason {
            Err(reason) => Err(reason),
            Ok(reason) => match udp::open((key.to, key.port).into()) {
                Ok(socket) => Ok(UdpFlow {
                    socket,
                    source_port: key.source_port,
                    to: key.to,
                    port: key.port,
                    started: cx.now,
                    used: cx.now,
                    up: 0,
                    down: 0,
                    name: name.clone(),
                    reason,
                }),
                Err(_) => Err(Reason::Unreachable),
            },
        };
        match opened {
            Ok(flow) => {
                let slot = self.occupy(Slot::Udp(Box::new(flow)), cx).ok()?;
                self.flows.insert(key, slot);
                self.counters.flows += 1;
                Some(slot)
            }
            Err(reason) => {
                self.note_denied(key, name, reason, cx);
                None
            }
        }
    }

    pub(super) fn udp_ready(&mut self, slot: u32, cx: &mut Context<'_>) {
        let mut buffer = vec![0; 65535];
        for _ in 0..PER_TURN {
            let Some(Slot::Udp(flow)) = self.slots.get_mut(slot as usize) else {
                return;
            };
            match udp::get(&flow.socket, &mut buffer) {
                Ok(None) => return,
                Ok(Some(len)) => {
                    flow.used = cx.now;
                    flow.down += len as u64;
                    self.counters.bytes_down += len as u64;
                    let payload = buffer.get(..len).unwrap_or_default();
                    let frame =
                        wire::datagram(self.mac, flow.to, flow.port, flow.source_port, payload);
                    self.send(frame);
                }
                Err(_) => {
                    self.close(slot, cx);
                    return;
                }
            }
        }
        // Edge-triggered: registering again reports what is left.
        if let Some(Slot::Udp(flow)) = self.slots.get(slot as usize) {
            use rustix::event::epoll;
            let token = epoll::EventData::new_u64(u64::from(cx.index) << 32 | u64::from(slot));
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            let _ = epoll::modify(cx.epoll, flow.socket.as_fd(), token, flags);
        }
    }

    pub(super) fn udp_tick(&mut self, slot: u32, cx: &mut Context<'_>) {
        if let Some(Slot::Udp(flow)) = self.slots.get(slot as usize)
            && cx.now.saturating_duration_since(flow.used) > IDLE
        {
            self.close(slot, cx);
        }
    }

    /// A question to any server is answered by the resolver, so that images with a fixed server work.
    fn question(&mut self, datagram: &Datagram<'_>, cx: &mut Context<'_>) {
        self.counters.dns += 1;
        if !self.dns.take(cx.now) || self.questions >= MAX_QUESTIONS {
            self.counters.dns_denied += 1;
            return;
        }
        let (to, source_port) = (datagram.to, datagram.source_port);
        match dns::question(datagram.payload, cx.floor, &self.policy) {
            Step::Ignore => {}
            Step::Answer { message, denied } => {
                if let Some((name, reason)) = denied {
                    self.counters.dns_denied += 1;
                    let key = Key {
                        protocol: Protocol::Udp,
                        source_port,
                        to,
                        port: DNS_PORT,
                    };
                    self.log_denied(key, Some(name), reason, cx);
                }
                self.send(wire::datagram(
                    self.mac,
                    to,
                    DNS_PORT,
                    source_port,
                    &message,
                ));
            }
            Step::Forward { message, asked } => {
                self.forward(
                    Forward {
                        message,
                        asked,
                        to,
                        source_port,
                        server: 0,
                    },
                    cx,
                );
            }
        }
    }

    /// Asks the server, or the first one after it that can be asked.
    fn forward(&mut self, forward: Forward, cx: &mut Context<'_>) {
        let Forward {
            message,
            asked,
            to,
            source_port,
            server,
        } = forward;
        for (index, address) in cx.resolvers.iter().enumerate().skip(server) {
            let Ok(socket) = udp::open(*address) else {
                continue;
            };
            if udp::put(&socket, &message).is_err() {
                continue;
            }
            let query = DnsQuery {
                socket,
                asked,
                message,
                source_port,
                to,
                sent: cx.now,
                next_server: index + 1,
            };
            let _ = self.occupy(Slot::Dns(Box::new(query)), cx);
            return;
        }
        if let Some(failure) = dns::failure(&asked) {
            self.send(wire::datagram(
                self.mac,
                to,
                DNS_PORT,
                source_port,
                &failure,
            ));
        }
    }

    pub(super) fn dns_ready(&mut self, slot: u32, cx: &mut Context<'_>) {
        let mut buffer = [0; 4096];
        let Some(Slot::Dns(query)) = self.slots.get(slot as usize) else {
            return;
        };
        let len = match udp::get(&query.socket, &mut buffer) {
            Ok(None) => return,
            Ok(Some(len)) => len,
            Err(_) => {
                self.next_server(slot, cx);
                return;
            }
        };
        let bytes = buffer.get(..len).unwrap_or_default();
        let Some(answer) = dns::reply(bytes, &query.asked, &self.policy, cx.host) else {
            return;
        };
        let (to, source_port) = (query.to, query.source_port);
        let name: DomainName = query.asked.name().clone();
        for (address, ttl) in answer.addresses {
            self.pins.add(address, &name, ttl, cx.now);
        }
        self.send(wire::datagram(
            self.mac,
            to,
            DNS_PORT,
            source_port,
            &answer.message,
        ));
        self.close(slot, cx);
    }

    pub(super) fn dns_tick(&mut self, slot: u32, cx: &mut Context<'_>) {
        if let Some(Slot::Dns(query)) = self.slots.get(slot as usize)
            && cx.now.saturating_duration_since(query.sent) > SERVER_TIME
        {
            self.next_server(slot, cx);
        }
    }

    fn next_server(&mut self, slot: u32, cx: &mut Context<'_>) {
        let Some(Slot::Dns(query)) = self.slots.get(slot as usize) else {
            return;
        };
        let forward = Forward {
            message: query.message.clone(),
            asked: query.asked.clone(),
            to: query.to,
            source_port: query.source_port,
            server: query.next_server,
        };
        self.close(slot, cx);
        self.forward(forward, cx);
    }
}

/// A question on its way to a server.
struct Forward {
    message: Vec<u8>,
    asked: dns::Asked,
    to: std::net::Ipv4Addr,
    source_port: u16,
    /// The place of the server.
    server: usize,
}
