//! All connections of a guest, and the packets that wait for it.
//!
//! [`Muxer`] routes packets by port pair and serves connections in turn. Bounds: [`MAX_CONNECTIONS`]
//! connections, `MAX_CONTROL` waiting packets without data, and a rate for connections that the guest opens.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use forkd_vmm_proto::READY_PORT;

use super::VsockMetrics;
use super::connection::{Connection, Phase, Ports, Taken};
use super::greeting;
use super::packet::{HOST_CID, Header, Op, SHUT_BOTH, SHUT_SEND, TYPE_STREAM};
use crate::rate::Budget;
use crate::{DeviceEvents, Ready, Registrar, TimerFd};

/// The most connections at once.
pub(super) const MAX_CONNECTIONS: usize = 512;
/// The most packets without data that wait for the guest. With more, the guest's own packets wait, and new
/// clients of the host are refused.
const MAX_CONTROL: usize = 1024;
/// The most connections in saved state.
pub(super) const MAX_BELIEVED: usize = 4 * MAX_CONNECTIONS;
/// How long the listener rests after an accept failed, for want of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// Ports for connections from the host begin here.
pub(super) const FIRST_HOST_PORT: u32 = 1 << 30;
/// Connections a second that a guest may open, and how many at once.
const GUEST_RATE: u64 = 100;

/// A packet without data.
#[derive(Debug, Clone, Copy)]
struct Control {
    ports: Ports,
    op: Op,
    flags: u32,
}

/// The event tokens of the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tokens {
    pub(super) listener: u32,
    pub(super) retry: u32,
    /// Connections have this one and those above it.
    pub(super) first_stream: u32,
}

pub(super) struct Muxer {
    pub(super) cid: u64,
    pub(super) listener: UnixListener,
    pub(super) listening: bool,
    /// Fires when a listener that rests is to be tried again. Made in advance: when accepting fails there
    /// may be no descriptor left to make it.
    retry: TimerFd,
    tokens: Tokens,
    pub(super) connections: BTreeMap<u32, Connection>,
    pub(super) by_ports: BTreeMap<Ports, u32>,
    control: VecDeque<Control>,
    /// Connections whose client may have data for the guest, in the order they are served.
    ready: VecDeque<u32>,
    next_token: u32,
    pub(super) next_port: u32,
    /// Connections from before a restore, which the guest still believes in.
    pub(super) inherited: Vec<Ports>,
    announced: bool,
    guest_budget: Option<Budget>,
    events: Arc<dyn DeviceEvents>,
    pub(super) metrics: Arc<VsockMetrics>,
    /// Where to register; only while the driver is up.
    pub(super) registrar: Option<Registrar>,
}

impl Muxer {
    pub(super) fn new(
        cid: u64,
        listener: UnixListener,
        tokens: Tokens,
        events: Arc<dyn DeviceEvents>,
        metrics: Arc<VsockMetrics>,
    ) -> io::Result<Self> {
        Ok(Self {
            cid,
            listener,
            listening: false,
            retry: TimerFd::new()?,
            tokens,
            connections: BTreeMap::new(),
            by_ports: BTreeMap::new(),
            control: VecDeque::new(),
            ready: VecDeque::new(),
            next_token: tokens.first_stream,
            next_port: FIRST_HOST_PORT,
            inherited: Vec::new(),
            announced: false,
            guest_budget: Budget::new(GUEST_RATE, GUEST_RATE),
            events,
            metrics,
            registrar: None,
        })
    }

    /// The driver is up. Connections from before a restore are reset first.
    pub(super) fn start(&mut self, registrar: Registrar) -> io::Result<()> {
        registrar.add(&self.retry, self.tokens.retry, Ready::IN)?;
        if let Err(error) = registrar.add(&self.listener, self.tokens.listener, Ready::IN) {
            registrar.remove(&self.retry);
            return Err(error);
        }
        self.listening = true;
        self.registrar = Some(registrar);
        for ports in std::mem::take(&mut self.inherited) {
            self.push(ports, Op::Reset, 0);
        }
        Ok(())
    }

    /// The driver was reset: ends all connections.
    pub(super) fn stop(&mut self) {
        if let Some(registrar) = self.registrar.take() {
            registrar.remove(&self.listener);
            registrar.remove(&self.retry);
            for connection in self.connections.values_mut() {
                connection.unlisten(&registrar);
            }
        }
        self.listening = false;
        self.connections.values().for_each(Connection::hang_up);
        self.connections.clear();
        self.by_ports.clear();
        self.control.clear();
        self.ready.clear();
        self.inherited.clear();
        self.announced = false;
        self.metrics.open.set(0);
    }

    /// The connections the guest may believe in, at most `MAX_BELIEVED`. One that is left out is reset
    /// when the guest next uses it.
    pub(super) fn believed(&self) -> BTreeSet<Ports> {
        let mut all: BTreeSet<Ports> = self.by_ports.keys().copied().collect();
        let waiting = self.control.iter().map(|control| control.ports);
        for ports in waiting.chain(self.inherited.iter().copied()) {
            if all.len() == MAX_BELIEVED {
                break;
            }
            all.insert(ports);
        }
        all
    }

    /// Whether there may be something for the guest.
    pub(super) fn has_output(&self) -> bool {
        !self.control.is_empty() || !self.ready.is_empty()
    }

    /// Whether the guest has to take packets before more of its own are looked at.
    pub(super) fn is_full(&self) -> bool {
        self.control.len() >= MAX_CONTROL
    }

    pub(super) fn push(&mut self, ports: Ports, op: Op, flags: u32) {
        if op == Op::Reset {
            self.metrics.connection_resets.inc();
        }
        self.control.push_back(Control { ports, op, flags });
    }

    /// The next packet for the guest; its data, if any, is put at the start of `data`.
    pub(super) fn next_packet(&mut self, data: &mut [u8]) -> Option<Header> {
        loop {
            if let Some(control) = self.control.pop_front() {
                return Some(self.header(control, 0));
            }
            let token = self.ready.pop_front()?;
            if let Some(header) = self.next_data(token, data) {
                return Some(header);
            }
        }
    }

    fn next_data(&mut self, token: u32, data: &mut [u8]) -> Option<Header> {
        let connection = self.connections.get_mut(&token)?;
        connection.queued = false;
        if !connection.reads() {
            return None;
        }
        let ports = connection.ports;
        let limit = connection.credit().min(data.len());
        if limit == 0 {
            if !connection.asked_credit {
                connection.asked_credit = true;
                self.push(ports, Op::CreditRequest, 0);
            }
            self.listen(token);
            return None;
        }
        match connection.take(&mut data[..limit]) {
            Taken::Data(count) => {
                connection.queued = true;
                self.ready.push_back(token);
                self.metrics.bytes_to_guest.add(count as u64);
                let control = Control {
                    ports,
                    op: Op::Data,
                    flags: 0,
                };
                // A packet is at most 64 KiB.
                Some(self.header(control, count as u32))
            }
            Taken::Nothing => {
                self.listen(token);
                None
            }
            Taken::End => {
                let flags = if connection.check_hung_up() {
                    SHUT_BOTH
                } else {
                    SHUT_SEND
                };
                connection.host_shut |= flags;
                self.push(ports, Op::Shutdown, flags);
                self.listen(token);
                None
            }
        }
    }

    fn header(&mut self, control: Control, len: u32) -> Header {
        let mut header = Header {
            src_cid: HOST_CID,
            dst_cid: self.cid,
            src_port: control.ports.host,
            dst_port: control.ports.guest,
            len,
            kind: TYPE_STREAM,
            op: control.op,
            flags: control.flags,
            buf_alloc: 0,
            fwd_cnt: 0,
        };
        if let Some(connection) = self
            .by_ports
            .get(&control.ports)
            .and_then(|token| self.connections.get_mut(token))
        {
            connection.put_credit(&mut header);
        }
        self.metrics.packets_to_guest.inc();
        header
    }

    /// Takes a packet from the guest.
    pub(super) fn on_packet(&mut self, header: &Header, data: &[u8]) {
        self.metrics.packets_from_guest.inc();
        let ports = Ports {
            host: header.dst_port,
            guest: header.src_port,
        };
        if header.dst_cid != HOST_CID || header.src_cid != self.cid || header.kind != TYPE_STREAM {
            self.metrics.bad_packets.inc();
            if header.op != Op::Reset && header.dst_cid == HOST_CID {
                self.push(ports, Op::Reset, 0);
            }
            return;
        }
        match (self.by_ports.get(&ports).copied(), header.op) {
            (Some(token), _) => self.on_known(token, header, data),
            (None, Op::Request) => self.on_request(ports, header),
            (None, Op::Reset) => {}
            (None, _) => {
                self.metrics.bad_packets.inc();
                self.push(ports, Op::Reset, 0);
            }
        }
    }

    fn on_request(&mut self, ports: Ports, header: &Header) {
        let allowed = self.connections.len() < MAX_CONNECTIONS
            && self
                .guest_budget
                .as_mut()
                .is_none_or(|budget| budget.take(1));
        let pair = match ports.host {
            _ if !allowed => None,
            READY_PORT => Some((None, None)),
            _ => UnixStream::pair()
                .and_then(|(ours, theirs)| ours.set_nonblocking(true).map(|()| (ours, theirs)))
                .ok()
                .map(|(ours, theirs)| (Some(ours), Some(theirs))),
        };
        let Some((ours, theirs)) = pair else {
            self.metrics.refused.inc();
            self.push(ports, Op::Reset, 0);
            return;
        };
        self.metrics.guest_connections.inc();
        let mut connection = Connection::new(ports, Phase::Open, ours);
        connection.learn_credit(header);
        if theirs.is_none() {
            connection.host_shut = SHUT_BOTH;
        }
        let token = self.insert(connection);
        self.by_ports.insert(ports, token);
        self.push(ports, Op::Response, 0);
        match theirs {
            Some(theirs) => {
                self.listen(token);
                self.events.vsock_connect(ports.host, OwnedFd::from(theirs));
            }
            None => {
                self.push(ports, Op::Shutdown, SHUT_BOTH);
                if !self.announced {
                    self.announced = true;
                    self.events.agent_ready();
                }
            }
        }
    }

    fn on_known(&mut self, token: u32, header: &Header, data: &[u8]) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        connection.learn_credit(header);
        let ports = connection.ports;
        let open = matches!(connection.phase, Phase::Open);
        let fine = match header.op {
            Op::Reset => {
                self.metrics.connection_resets.inc();
                self.remove(token);
                return;
            }
            Op::Response if matches!(connection.phase, Phase::Requested) => {
                connection.phase = Phase::Open;
                connection
                    .stream()
                    .is_none_or(|stream| greeting::accept(stream, ports.host).is_ok())
            }
            Op::Shutdown if open => {
                if connection.guest_shuts(header.flags) {
                    self.let_go(token);
                    return;
                }
                true
            }
            Op::Data if open => {
                self.metrics.bytes_from_guest.add(data.len() as u64);
                connection.give(data) && !connection.broken
            }
            Op::CreditUpdate if open => true,
            Op::CreditRequest if open => {
                self.push(ports, Op::CreditUpdate, 0);
                true
            }
            _ => {
                self.metrics.bad_packets.inc();
                false
            }
        };
        if fine {
            self.after_traffic(token);
        } else {
            self.abort(token);
        }
    }

    /// The guest has shut both directions: it is answered at once, and what it sent goes on to the client.
    fn let_go(&mut self, token: u32) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        connection.phase = Phase::Draining;
        let ports = connection.ports;
        let drained = connection.drained();
        self.by_ports.remove(&ports);
        self.push(ports, Op::Reset, 0);
        if drained {
            self.remove(token);
        } else {
            self.listen(token);
        }
    }

    fn abort(&mut self, token: u32) {
        if let Some(ports) = self.connections.get(&token).map(|c| c.ports) {
            self.push(ports, Op::Reset, 0);
            self.remove(token);
        }
    }

    fn after_traffic(&mut self, token: u32) {
        if let Some(connection) = self.connections.get_mut(&token) {
            let ports = connection.ports;
            if connection.owes_credit() {
                self.push(ports, Op::CreditUpdate, 0);
            }
        }
        self.listen(token);
    }

    /// Listens to a connection according to its state.
    pub(super) fn listen(&mut self, token: u32) {
        let (Some(registrar), Some(connection)) =
            (&self.registrar, self.connections.get_mut(&token))
        else {
            return;
        };
        let readable = match connection.phase {
            Phase::Greeting(_) => true,
            Phase::Open => connection.reads() && connection.credit() > 0 && !connection.queued,
            Phase::Requested | Phase::Draining => false,
        };
        connection.listen(registrar, token, readable);
    }

    pub(super) fn insert(&mut self, connection: Connection) -> u32 {
        loop {
            let token = self.next_token;
            self.next_token = token.checked_add(1).unwrap_or(self.tokens.first_stream);
            if let std::collections::btree_map::Entry::Vacant(entry) = self.connections.entry(token)
            {
                entry.insert(connection);
                self.metrics.open.set(self.connections.len() as u64);
                return token;
            }
        }
    }

    pub(super) fn remove(&mut self, token: u32) {
        let Some(mut connection) = self.connections.remove(&token) else {
            return;
        };
        if self.by_ports.get(&connection.ports) == Some(&token) {
            self.by_ports.remove(&connection.ports);
        }
        self.metrics.open.set(self.connections.len() as u64);
        connection.hang_up();
        if let Some(registrar) = &self.registrar {
            connection.unlisten(registrar);
        }
        self.listen_for_clients();
    }

    /// Stops taking clients in until a connection ends.
    pub(super) fn stop_listening(&mut self) {
        self.metrics.refused.inc();
        if let Some(registrar) = &self.registrar {
            registrar.remove(&self.listener);
            self.listening = false;
        }
    }

    /// Stops taking clients in for `ACCEPT_RETRY`.
    pub(super) fn rest_listener(&mut self) {
        self.stop_listening();
        // If the timer cannot be armed, the end of a connection is left to try again.
        let _ = self.retry.arm(ACCEPT_RETRY);
    }

    /// The listener has rested.
    pub(super) fn on_retry(&mut self) {
        self.retry.take();
        self.listen_for_clients();
    }

    fn listen_for_clients(&mut self) {
        let Some(registrar) = self.registrar.as_ref().filter(|_| !self.listening) else {
            return;
        };
        self.listening = registrar
            .add(&self.listener, self.tokens.listener, Ready::IN)
            .is_ok();
        if !self.listening {
            let _ = self.retry.arm(ACCEPT_RETRY);
        }
    }

    /// A client's stream is ready.
    pub(super) fn on_stream(&mut self, token: u32, ready: Ready) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        let gone = ready.intersects(Ready::HUP | Ready::ERR);
        match &mut connection.phase {
            Phase::Greeting(_) => self.on_greeting(token),
            Phase::Requested if gone => self.abort(token),
            Phase::Requested => self.listen(token),
            Phase::Open => self.on_open(token, ready),
            Phase::Draining => {
                connection.hung_up |= gone;
                connection.flush();
                if connection.drained() || connection.broken {
                    self.remove(token);
                } else {
                    self.listen(token);
                }
            }
        }
    }

    fn on_open(&mut self, token: u32, ready: Ready) {
        let Some(connection) = self.connections.get_mut(&token) else {
            return;
        };
        if ready.intersects(Ready::OUT | Ready::ERR | Ready::HUP) {
            connection.flush();
        }
        if connection.broken {
            self.abort(token);
            return;
        }
        let gone = ready.intersects(Ready::HUP | Ready::ERR);
        connection.hung_up |= gone;
        if connection.reads() {
            if !connection.queued && (gone || ready.intersects(Ready::IN | Ready::RDHUP)) {
                connection.queued = true;
                self.ready.push_back(token);
            }
        } else if gone && connection.host_shut != SHUT_BOTH {
            connection.host_shut = SHUT_BOTH;
            let ports = connection.ports;
            self.push(ports, Op::Shutdown, SHUT_BOTH);
        }
        self.after_traffic(token);
    }
}
