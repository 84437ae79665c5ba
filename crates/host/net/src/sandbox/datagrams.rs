//! UDP of a guest: relayed datagrams.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use forkd_net_proto::{FlowRecord, Reason, Verdict};
use forkd_types::Protocol;

use super::questions::DNS_PORT;
use super::{Context, Key, Sandbox, Slot, millis};
use crate::limit::Direction;
use crate::policy::{Decision, Said};
use crate::udp::{self, Asker, UdpFlow};
use crate::wire::{self, Datagram};

/// UDP flows open at one time.
const MAX_UDP: u32 = 512;
const IDLE: Duration = Duration::from_secs(60);
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
            let asker = Asker::Datagram {
                source_port: datagram.source_port,
                to: datagram.to,
            };
            self.question(datagram.payload, asker, cx);
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
        let len = datagram.payload.len();
        if let Some(slot) = slot
            && self.bytes.is_over(self.counters.bytes_up + len as u64)
        {
            self.close(slot, cx);
            self.note_denied(key, None, Reason::Quota, cx);
        }
        let sent = match slot.and_then(|slot| self.slots.get_mut(slot as usize)) {
            Some(Slot::Udp(flow)) => {
                flow.used = cx.now;
                if !self.bytes.take_datagram(Direction::Up, len, cx.now) {
                    self.counters.limited += 1;
                    return;
                }
                flow.up += len as u64;
                self.counters.bytes_up += len as u64;
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
            Decision::Allow(_) if self.bytes.is_over(self.counters.bytes_up) => Err(Reason::Quota),
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
                    if !self.bytes.take_datagram(Direction::Down, len, cx.now) {
                        self.counters.limited += 1;
                        continue;
                    }
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
}
