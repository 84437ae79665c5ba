//! One connection of a guest to a host that has an injection.
//!
//! ```text
//!   both sides in TLS ──► requests go up, answers go down ──► one side ended ──► (gone)
//!          └── refused ──► answer with the reason ──► wait for the end of the guest ──► (gone)
//! ```
//!
//! No byte of a request goes up before the certificate of the upstream was checked. After a refusal the upstream socket
//! is closed at once.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use forkd_net_proto::broker::{BrokeredFlow, Refusal};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use crate::request::{MAX_HEAD, RequestReader};
use crate::tls::{Fault, STEP, Tls};
use crate::vault::Vault;

/// How long both sides together may take for TLS.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// How long a refused guest may take to read the answer.
const LINGER: Duration = Duration::from_secs(5);
/// Bytes of a request that wait for the upstream.
const MAX_PENDING: usize = 64 * 1024;

/// A connection of a guest with both of its ends.
pub struct Flow {
    pub wish: BrokeredFlow,
    pub guest: Tls,
    pub upstream: Option<Tls>,
    vault: Arc<RwLock<Vault>>,
    reader: RequestReader,
    /// Plaintext of the guest that is not checked yet.
    input: Vec<u8>,
    /// Requests with their secrets, on the way up.
    up: Vec<u8>,
    down: Vec<u8>,
    refused: Option<Refusal>,
    /// Requests that went up since the last look.
    requests: u64,
    deadline: Option<Instant>,
    /// Both sides spoke TLS once.
    settled: bool,
}

/// How a flow stands after a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    Waiting,
    Done,
}

impl Flow {
    pub fn new(
        wish: BrokeredFlow,
        sockets: (OwnedFd, OwnedFd),
        server: Arc<ServerConfig>,
        client: Arc<ClientConfig>,
        vault: Arc<RwLock<Vault>>,
        now: Instant,
    ) -> Result<Self, rustls::Error> {
        let (guest, upstream) = sockets;
        let name = ServerName::try_from(wish.to.host.to_string())
            .map_err(|_| rustls::Error::General("the name cannot be used in TLS".into()))?;
        let server = Connection::Server(ServerConnection::new(server)?);
        let client = Connection::Client(ClientConnection::new(client, name)?);
        Ok(Self {
            reader: RequestReader::new(wish.to.clone()),
            wish,
            guest: Tls::new(guest, server),
            upstream: Some(Tls::new(upstream, client)),
            vault,
            input: Vec::new(),
            up: Vec::new(),
            down: Vec::new(),
            refused: None,
            requests: 0,
            deadline: Some(now + HANDSHAKE),
            settled: false,
        })
    }

    /// Requests that went up since the last call.
    pub fn take_requests(&mut self) -> u64 {
        std::mem::take(&mut self.requests)
    }

    /// Moves everything that can move. The refusal, if this turn refused the flow.
    pub fn pump(&mut self, now: Instant) -> (After, Option<Refusal>) {
        let before = self.refused;
        let after = match self.moves(now) {
            Ok(after) => after,
            Err(Ended) => After::Done,
        };
        (after, self.refused.filter(|_| before.is_none()))
    }

    /// Ends what takes too long.
    pub fn tick(&mut self, now: Instant) -> (After, Option<Refusal>) {
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return (After::Waiting, None);
        }
        let handshaking = |tls: &Tls| tls.connection.is_handshaking();
        let reason = match handshaking(&self.guest) {
            true => Some(Refusal::GuestTls),
            false if self.upstream.as_ref().is_some_and(handshaking) => Some(Refusal::UpstreamTls),
            false => None,
        };
        (After::Done, reason.filter(|_| self.refused.is_none()))
    }

    fn moves(&mut self, now: Instant) -> Result<After, Ended> {
        loop {
            let mut moved = self.fill(now)?;
            self.settle();
            moved |= self.upward(now);
            moved |= self.downward(now);
            moved |= self.flush(now)?;
            if !moved {
                return Ok(self.after());
            }
        }
    }

    fn fill(&mut self, now: Instant) -> Result<bool, Ended> {
        let mut moved = match self.guest.fill() {
            Ok(moved) => moved,
            Err(fault) => {
                if matches!(fault, Fault::Tls(_)) {
                    // The alert says why.
                    let _ = self.guest.flush();
                    self.refused.get_or_insert(Refusal::GuestTls);
                }
                return Err(Ended);
            }
        };
        match self.upstream.as_mut().map(Tls::fill) {
            Some(Ok(more)) => moved |= more,
            Some(Err(fault)) => {
                moved = true;
                self.upstream_failed(&fault, now)?;
            }
            None => {}
        }
        Ok(moved)
    }

    fn flush(&mut self, now: Instant) -> Result<bool, Ended> {
        let mut moved = self.guest.flush().map_err(|_| Ended)?;
        match self.upstream.as_mut().map(Tls::flush) {
            Some(Ok(more)) => moved |= more,
            Some(Err(fault)) => {
                moved = true;
                self.upstream_failed(&fault, now)?;
            }
            None => {}
        }
        self.guest.close_stream();
        if let Some(upstream) = &mut self.upstream {
            upstream.close_stream();
        }
        Ok(moved)
    }

    /// An upstream that fails before the first request is a refusal with a reason; later it is the end.
    fn upstream_failed(&mut self, fault: &Fault, now: Instant) -> Result<(), Ended> {
        let handshaking = |tls: &Tls| tls.connection.is_handshaking();
        if !self.upstream.as_ref().is_some_and(handshaking) {
            return Err(Ended);
        }
        let reason = match fault {
            Fault::Tls(rustls::Error::InvalidCertificate(_)) => Refusal::UpstreamCertificate,
            _ => Refusal::UpstreamTls,
        };
        if let Some(upstream) = &mut self.upstream {
            // The alert for the upstream.
            let _ = upstream.flush();
        }
        self.refuse(reason, now);
        Ok(())
    }

    /// Drops the deadline once both sides speak TLS.
    fn settle(&mut self) {
        let done = |tls: &Tls| !tls.connection.is_handshaking();
        let both = done(&self.guest) && self.upstream.as_ref().is_some_and(done);
        if both && !self.settled {
            self.settled = true;
            self.deadline = None;
        }
    }

    /// Requests of the guest, with their secrets.
    fn upward(&mut self, now: Instant) -> bool {
        if self.guest.connection.is_handshaking() {
            return false;
        }
        if self.refused.is_some() {
            // The guest may still send a body; it goes nowhere.
            let mut rest = Vec::new();
            return self.guest.read(&mut rest);
        }
        if !self.names_its_host() {
            self.refuse(Refusal::WrongHost, now);
            return true;
        }
        let room = self.up.len() < MAX_PENDING && self.input.len() < MAX_HEAD + STEP;
        let mut moved = room && self.guest.read(&mut self.input);
        let ready = |tls: &Tls| !tls.connection.is_handshaking();
        if !self.upstream.as_ref().is_some_and(ready) {
            return moved;
        }
        if !self.input.is_empty() && self.up.len() < MAX_PENDING {
            let before = self.input.len();
            if let Err(reason) = self.checked() {
                self.refuse(reason, now);
                return true;
            }
            moved |= self.input.len() < before;
        }
        if let Some(upstream) = &mut self.upstream {
            if !self.up.is_empty() {
                moved |= upstream.write(&mut self.up);
            }
            if self.guest.ended && self.up.is_empty() && (self.input.is_empty() || !moved) {
                moved |= upstream.finish();
            }
        }
        moved
    }

    /// Turns bytes of the guest into bytes for the upstream.
    fn checked(&mut self) -> Result<(), Refusal> {
        let (vault, wish) = (&self.vault, &self.wish);
        let mut secrets = || {
            let vault = vault.read().unwrap_or_else(PoisonError::into_inner);
            vault.injections(&wish.id, &wish.to)
        };
        self.requests += self
            .reader
            .advance(&mut self.input, &mut self.up, &mut secrets)?;
        Ok(())
    }

    /// The client named the host of the rule in TLS.
    fn names_its_host(&self) -> bool {
        match &self.guest.connection {
            Connection::Server(server) => server
                .server_name()
                .is_some_and(|name| name.eq_ignore_ascii_case(self.wish.to.host.as_str())),
            Connection::Client(_) => false,
        }
    }

    /// Answers of the upstream, byte for byte.
    fn downward(&mut self, now: Instant) -> bool {
        let mut moved = false;
        if let Some(upstream) = self.upstream.as_mut().filter(|_| self.down.is_empty()) {
            moved |= upstream.read(&mut self.down);
        }
        if self.guest.connection.is_handshaking() {
            return moved;
        }
        if !self.down.is_empty() {
            moved |= self.guest.write(&mut self.down);
        }
        let ended = self.upstream.as_ref().is_none_or(|upstream| upstream.ended);
        if ended && self.down.is_empty() && self.guest.finish() {
            moved = true;
            self.deadline = Some(now + LINGER);
        }
        moved
    }

    /// Closes the upstream and tells the guest why, if the guest can still be told.
    fn refuse(&mut self, reason: Refusal, now: Instant) {
        let between = self.reader.is_between_requests();
        self.refused.get_or_insert(reason);
        self.upstream = None;
        self.input = Vec::new();
        self.up = Vec::new();
        self.deadline = Some(now + LINGER);
        // In the middle of a request its answer may be under way.
        if between && self.down.is_empty() {
            self.down = answer(reason, &self.wish);
        }
    }

    fn after(&self) -> After {
        let answered = self.down.is_empty() && !self.guest.connection.wants_write();
        let guest_gone = self.guest.ended && !self.guest.connection.is_handshaking();
        let upstream_done = self.upstream.as_ref().is_none_or(|upstream| upstream.ended);
        let dead = self.guest.ended && self.guest.connection.is_handshaking();
        match dead || (answered && upstream_done && guest_gone) {
            true => After::Done,
            false => After::Waiting,
        }
    }
}

/// The guest is gone, or nothing more can be said to it.
struct Ended;

fn answer(reason: Refusal, wish: &BrokeredFlow) -> Vec<u8> {
    let status = match reason {
        Refusal::UpstreamCertificate | Refusal::UpstreamTls => "502 Bad Gateway",
        _ => "403 Forbidden",
    };
    let body = format!(
        "{{\"error\":{{\"code\":\"{}\",\"message\":\"forkd sent no request to {}: {reason}\"}}}}\n",
        reason.code(),
        wish.to
    );
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}
