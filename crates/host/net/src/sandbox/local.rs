//! TCP connections of a guest that the engine answers itself: DNS on port 53 of any address, and a page on port 80 of the
//! gateway that lists what was denied, and why.

use std::fmt::Write;
use std::time::{Duration, Instant};

use forkd_net_proto::{FlowRecord, Reason, Verdict};

use super::questions::DNS_PORT;
use super::{Context, Key, Sandbox, Slot};
use crate::tcp::{GuestTcp, Smoltcp};
use crate::udp::{self, Asker};
use crate::wire::{self, Segment};

/// Such connections that are open at one time.
const MAX_STREAMS: u32 = 64;
const BUFFER: usize = 16 * 1024;
const IDLE: Duration = Duration::from_secs(10);
/// Denials on the page.
const SHOWN: usize = 20;
/// The longest request for the page.
const MAX_REQUEST: usize = 8 * 1024;

/// A service of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    Dns,
    Denials,
}

impl Service {
    /// The service at the destination of a connection.
    pub(super) fn at(key: &Key) -> Option<Self> {
        match (key.to, key.port) {
            (_, DNS_PORT) => Some(Self::Dns),
            (wire::GATEWAY, 80) => Some(Self::Denials),
            _ => None,
        }
    }
}

/// A connection to a service.
pub struct LocalStream {
    pub key: Key,
    service: Service,
    guest: Box<Smoltcp>,
    used: Instant,
    input: Vec<u8>,
    output: Vec<u8>,
    /// The answer is complete: the connection ends when it is sent.
    last: bool,
}

impl Sandbox {
    pub(super) fn open_local(
        &mut self,
        key: Key,
        service: Service,
        segment: &Segment<'_>,
        cx: &mut Context<'_>,
    ) {
        if self.local_streams >= MAX_STREAMS || !self.new_flows.take(cx.now) {
            self.note_denied(key, None, Reason::Limit, cx);
            self.send(wire::reset_for(self.mac, segment));
            return;
        }
        let mut syn = segment.packet.to_vec();
        let mss = wire::raise_mss(&mut syn);
        let mut guest = Box::new(Smoltcp::new(key.to, key.port, mss, BUFFER, cx.now));
        guest.input(&syn, &mut self.out, self.mac, cx.now);
        let stream = LocalStream {
            key,
            service,
            guest,
            used: cx.now,
            input: Vec::new(),
            output: Vec::new(),
            last: false,
        };
        if let Ok(slot) = self.occupy(Slot::Local(Box::new(stream)), cx) {
            self.flows.insert(key, slot);
        }
    }

    pub(super) fn continue_local(
        &mut self,
        slot: u32,
        segment: &Segment<'_>,
        cx: &mut Context<'_>,
    ) {
        let mac = self.mac;
        let Some(Slot::Local(stream)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        stream.used = cx.now;
        let guest = &mut stream.guest;
        guest.input(segment.packet, &mut self.out, mac, cx.now);
        let input = &mut stream.input;
        guest.read(&mut |bytes| {
            input.extend_from_slice(bytes);
            bytes.len()
        });
        match stream.service {
            Service::Dns => self.read_questions(slot, cx),
            Service::Denials => self.read_request(slot),
        }
        self.serve_local(slot, cx);
    }

    fn read_questions(&mut self, slot: u32, cx: &mut Context<'_>) {
        while let Some(Slot::Local(stream)) = self.slots.get_mut(slot as usize) {
            let Some((question, rest)) = udp::unframed(&stream.input) else {
                return;
            };
            let (question, rest) = (question.to_vec(), rest.to_vec());
            stream.input = rest;
            let asker = Asker::Stream {
                source_port: stream.key.source_port,
                to: stream.key.to,
            };
            self.question(&question, asker, cx);
        }
    }

    /// Answers a request of HTTP. Whatever its path is, the page is the same.
    fn read_request(&mut self, slot: u32) {
        let page = self.denials();
        let Some(Slot::Local(stream)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        let whole = stream.input.windows(4).any(|end| end == b"\r\n\r\n");
        if whole && !stream.last {
            stream.output = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
                 connection: close\r\n\r\n{page}",
                page.len()
            )
            .into_bytes();
            stream.last = true;
        } else if stream.input.len() > MAX_REQUEST {
            stream.guest.abort();
        }
    }

    /// The last denials as JSON, newest first.
    fn denials(&self) -> String {
        let denied = self
            .log
            .newest()
            .filter(|entry| entry.verdict == Verdict::Denied);
        let mut text = format!(r#"{{"mode":"{}","denied":["#, self.policy.mode());
        for (index, entry) in denied.take(SHOWN).enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let name = match &entry.name {
                Some(name) => format!(r#""{}""#, escaped(name)),
                None => "null".to_owned(),
            };
            // Writing to a string does not fail.
            let _ = write!(
                text,
                r#"{comma}{{"at_unix_ms":{},"protocol":"{}","address":"{}","port":{},"name":{name},"reason":"{}"}}"#,
                entry.unix_ms,
                entry.protocol.as_str(),
                entry.address,
                entry.port,
                escaped(&self.reason(entry)),
            );
        }
        text.push_str("]}\n");
        text
    }

    /// The reason of a denial in words that name the policy.
    fn reason(&self, entry: &FlowRecord) -> String {
        match entry.reason {
            Reason::Rule(index) => {
                let rule = self.policy.rules().get(usize::from(index));
                match rule.filter(|_| entry.generation == self.generation) {
                    Some(rule) => format!("the rule {rule} of the network policy"),
                    None => "a rule of an earlier network policy".to_owned(),
                }
            }
            Reason::Floor(_) => "a rule of the operator".to_owned(),
            Reason::Default => format!("the network mode {}", self.policy.mode()),
            Reason::Group(group) => format!(
                "the network policy: addresses of the group {} need a rule",
                group.as_str()
            ),
            Reason::NameMismatch => {
                "the network policy: the client named no allowed host".to_owned()
            }
            Reason::Limit => "a limit of the network policy".to_owned(),
            Reason::Quota => "the limit egress_mib_total of the network policy".to_owned(),
            Reason::Unreachable => "the destination refused or did not answer".to_owned(),
            Reason::SecretHost => {
                "the network policy: a host with a secret is reached over TLS by its name"
                    .to_owned()
            }
            Reason::NoBroker => "the broker of secrets, which does not answer".to_owned(),
        }
    }

    /// Sends an answer on a connection that may have ended meanwhile.
    pub(super) fn answer_stream(&mut self, key: Key, bytes: &[u8], cx: &mut Context<'_>) {
        let Some(slot) = self.flows.get(&key).copied() else {
            return;
        };
        if let Some(Slot::Local(stream)) = self.slots.get_mut(slot as usize) {
            stream.output.extend_from_slice(bytes);
            self.serve_local(slot, cx);
        }
    }

    fn serve_local(&mut self, slot: u32, cx: &mut Context<'_>) {
        let mac = self.mac;
        let waits = self.has_question(slot);
        let Some(Slot::Local(stream)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        let (guest, output) = (&mut stream.guest, &mut stream.output);
        while !output.is_empty() {
            let written = guest.write(&mut |room| {
                let len = room.len().min(output.len());
                if let (Some(to), Some(from)) = (room.get_mut(..len), output.get(..len)) {
                    to.copy_from_slice(from);
                }
                len
            });
            if written == 0 {
                break;
            }
            output.drain(..written);
        }
        if output.is_empty() && (stream.last || guest.is_read_to_end() && !waits) {
            guest.finish();
        }
        guest.poll(&mut self.out, mac, cx.now);
        if guest.is_closed() {
            self.close(slot, cx);
        }
    }

    /// A question on this connection waits for a name server.
    fn has_question(&self, slot: u32) -> bool {
        let Some(Slot::Local(stream)) = self.slots.get(slot as usize) else {
            return false;
        };
        self.slots.iter().any(|other| match other {
            Slot::Dns(query) => query.asker.key() == stream.key,
            _ => false,
        })
    }

    pub(super) fn local_tick(&mut self, slot: u32, cx: &mut Context<'_>) {
        let mac = self.mac;
        let Some(Slot::Local(stream)) = self.slots.get_mut(slot as usize) else {
            return;
        };
        if cx.now.saturating_duration_since(stream.used) > IDLE {
            stream.guest.abort();
            stream.guest.poll(&mut self.out, mac, cx.now);
            self.close(slot, cx);
            return;
        }
        self.serve_local(slot, cx);
    }
}

/// A text inside quotation marks of JSON.
fn escaped(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '"' | '\\' => format!("\\{c}"),
            c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
            c => c.to_string(),
        })
        .collect()
}
