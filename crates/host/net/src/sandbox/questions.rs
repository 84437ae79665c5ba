//! Questions of a guest to the resolver, over UDP and TCP.
//!
//! A question to any server is answered by the resolver, so that images with a fixed server work. A question over UDP
//! goes to the name servers over UDP, one over TCP over TCP: a guest asks over TCP because an answer was too long.

use std::net::SocketAddr;
use std::time::Duration;

use forkd_types::{DomainName, Protocol};

use super::segments::dial;
use super::{Context, Key, Sandbox, Slot};
use crate::dns::{self, Step, Transport};
use crate::udp::{self, Asker, DnsQuery, Exchange};
use crate::wire;

pub const DNS_PORT: u16 = 53;
/// Questions that wait for an answer at one time.
const MAX_QUESTIONS: u32 = 256;
/// How long a name server may take before the next one is asked.
const SERVER_TIME: Duration = Duration::from_millis(1500);

/// A question on its way to a server.
struct Forward {
    message: Vec<u8>,
    asked: dns::Asked,
    asker: Asker,
    /// The place of the server.
    server: usize,
}

impl Asker {
    fn transport(self) -> Transport {
        match self {
            Self::Datagram { .. } => Transport::Udp,
            Self::Stream { .. } => Transport::Tcp,
        }
    }

    pub(super) fn key(self) -> Key {
        let (protocol, source_port, to) = match self {
            Self::Datagram { source_port, to } => (Protocol::Udp, source_port, to),
            Self::Stream { source_port, to } => (Protocol::Tcp, source_port, to),
        };
        Key {
            protocol,
            source_port,
            to,
            port: DNS_PORT,
        }
    }
}

impl Sandbox {
    /// Answers a question or forwards it.
    pub(super) fn question(&mut self, bytes: &[u8], asker: Asker, cx: &mut Context<'_>) {
        self.counters.dns += 1;
        if !self.dns.take(cx.now) || self.questions >= MAX_QUESTIONS {
            self.counters.dns_denied += 1;
            return;
        }
        match dns::question(bytes, asker.transport(), cx.floor, &self.policy) {
            Step::Ignore => {}
            Step::Answer { message, denied } => {
                if let Some((name, reason)) = denied {
                    self.counters.dns_denied += 1;
                    self.log_denied(asker.key(), Some(name), reason, cx);
                }
                self.answer(asker, &message, cx);
            }
            Step::Forward { message, asked } => {
                // A name can carry data out.
                self.counters.bytes_up += message.len() as u64;
                let server = match self.bytes.is_over(self.counters.bytes_up) {
                    true => usize::MAX,
                    false => 0,
                };
                let forward = Forward {
                    message,
                    asked,
                    asker,
                    server,
                };
                self.forward(forward, cx);
            }
        }
    }

    /// Sends an answer to the guest.
    fn answer(&mut self, asker: Asker, message: &[u8], cx: &mut Context<'_>) {
        match asker {
            Asker::Datagram { source_port, to } => {
                let frame = wire::datagram(self.mac, to, DNS_PORT, source_port, message);
                self.send(frame);
            }
            Asker::Stream { .. } => self.answer_stream(asker.key(), &udp::framed(message), cx),
        }
    }

    /// Asks the server, or the first one after it that can be asked.
    fn forward(&mut self, forward: Forward, cx: &mut Context<'_>) {
        let Forward {
            message,
            asked,
            asker,
            server,
        } = forward;
        for (index, address) in cx.resolvers.iter().enumerate().skip(server) {
            let opened = match asker.transport() {
                Transport::Udp => ask_udp(*address, &message),
                Transport::Tcp => dial(*address).map(|socket| (socket, Some(Exchange::default()))),
            };
            let Ok((socket, exchange)) = opened else {
                continue;
            };
            let query = DnsQuery {
                socket,
                asked,
                message,
                asker,
                exchange,
                sent: cx.now,
                next_server: index + 1,
            };
            let _ = self.occupy(Slot::Dns(Box::new(query)), cx);
            return;
        }
        if let Some(failure) = dns::failure(&asked) {
            self.answer(asker, &failure, cx);
        }
    }

    pub(super) fn dns_ready(&mut self, slot: u32, cx: &mut Context<'_>) {
        let Some(Slot::Dns(query)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        let mut buffer = [0; 4096];
        let got = match &mut query.exchange {
            Some(exchange) => exchange.advance(&query.socket, &query.message),
            None => udp::get(&query.socket, &mut buffer)
                .map(|len| len.and_then(|len| buffer.get(..len)).map(<[u8]>::to_vec)),
        };
        let bytes = match got {
            Ok(None) => return,
            Ok(Some(bytes)) => bytes,
            Err(_) => {
                self.next_server(slot, cx);
                return;
            }
        };
        let Some(answer) = dns::reply(&bytes, &query.asked, &self.policy, cx.host) else {
            return;
        };
        let asker = query.asker;
        let name: DomainName = query.asked.name().clone();
        for (address, ttl) in answer.addresses {
            self.pins.add(address, &name, ttl, cx.now);
        }
        self.close(slot, cx);
        self.answer(asker, &answer.message, cx);
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
            asker: query.asker,
            server: query.next_server,
        };
        self.close(slot, cx);
        self.forward(forward, cx);
    }
}

fn ask_udp(
    server: SocketAddr,
    message: &[u8],
) -> Result<(std::os::fd::OwnedFd, Option<Exchange>), rustix::io::Errno> {
    let socket = udp::open(server)?;
    udp::put(&socket, message)?;
    Ok((socket, None))
}
