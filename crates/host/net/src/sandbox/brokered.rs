//! Connections to hosts that have an injected secret: they go to the broker, or nowhere.
//!
//! The engine connects to the host as for every other flow, under the same policy, and looks at the first bytes. If they
//! begin TLS for a brokered host, the broker gets the connected socket and one end of a stream pair; the engine relays
//! the guest to the other end. The engine never has a secret, and the broker never opens a connection.

use std::os::fd::{AsFd, OwnedFd};

use forkd_net_proto::broker::BrokeredFlow;
use forkd_net_proto::{Reason, encode};
use forkd_types::{DomainName, HostPort, Protocol};
use rustix::event::epoll;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::{Context, Key, Sandbox, Slot};
use crate::peek::Peeked;

/// Plain HTTP: a host with a secret is not reached by it.
const HTTP_PORT: u16 = 80;

/// Where a connection goes after its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// To its destination.
    Straight,
    Broker,
    /// To no destination: the flow is reset.
    Refused,
}

impl Sandbox {
    pub fn set_brokered(&mut self, brokered: Vec<HostPort>) {
        self.brokered = brokered;
    }

    fn has_secret(&self, host: &DomainName) -> bool {
        self.brokered.iter().any(|to| to.host == *host)
    }

    /// The first bytes of such a connection decide whether it goes to the broker.
    pub(super) fn must_peek(&self, key: &Key) -> bool {
        let on_port = |to: &HostPort| to.port == key.port || key.port == HTTP_PORT;
        self.brokered.iter().any(on_port)
    }

    /// The guest found the address by the name of a brokered host.
    fn is_pinned(&self, key: &Key, cx: &Context<'_>) -> bool {
        let pins = self.pins.of(key.to.into(), cx.now);
        pins.iter().any(|name| self.has_secret(name))
    }

    /// Judges a connection by its first bytes. Address, name and protocol must agree.
    pub(super) fn way(&self, key: &Key, peeked: &Peeked, tls: bool, cx: &Context<'_>) -> Way {
        if self.brokered.is_empty() {
            return Way::Straight;
        }
        match peeked {
            Peeked::Name(name) if self.has_secret(name) => {
                let to = HostPort {
                    host: name.clone(),
                    port: key.port,
                };
                let pins = self.pins.of(key.to.into(), cx.now);
                match tls && self.brokered.contains(&to) && pins.contains(name) {
                    true => Way::Broker,
                    false => Way::Refused,
                }
            }
            Peeked::Name(_) => Way::Straight,
            // The name is hidden, and the host may be one with a secret.
            _ if self.must_peek(key) && self.is_pinned(key, cx) => Way::Refused,
            _ => Way::Straight,
        }
    }

    /// Gives a connection to the broker. The relay goes on with the engine's end of a new stream.
    pub(super) fn hand_over(
        &mut self,
        slot: u32,
        name: &DomainName,
        cx: &Context<'_>,
    ) -> Result<(), Reason> {
        let Some(Slot::Tcp(flow)) = self.slots.get_mut(slot as usize) else {
            return Err(Reason::NoBroker);
        };
        let link = cx.broker.ok_or(Reason::NoBroker)?;
        let wish = BrokeredFlow {
            id: cx.id.clone(),
            to: HostPort {
                host: name.clone(),
                port: flow.key.port,
            },
        };
        let failed = |_| Reason::NoBroker;
        let message = encode(&wish).map_err(|_| Reason::NoBroker)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed)?;
        // The broker shares the upstream socket, so closing our descriptor would not take it off the epoll descriptor.
        epoll::delete(cx.epoll, &flow.host.fd).map_err(failed)?;
        let fds = [theirs.as_fd(), flow.host.fd.as_fd()];
        forkd_channel::send(link, &message, &fds).map_err(|_| Reason::NoBroker)?;
        flow.host.fd = ours;
        flow.host.readable = true;
        flow.host.writable = true;
        flow.is_brokered = true;
        self.listen(slot, cx).map_err(failed)
    }

    /// Listens to the host socket of a slot.
    fn listen(&self, slot: u32, cx: &Context<'_>) -> rustix::io::Result<()> {
        let Some(Slot::Tcp(flow)) = self.slots.get(slot as usize) else {
            return Ok(());
        };
        let socket: &OwnedFd = &flow.host.fd;
        epoll::add(
            cx.epoll,
            socket,
            super::token(cx.index, slot),
            super::READINESS,
        )
    }

    /// Under the hosts that are brokered now, the flow would go the way that it went. A flow whose name is not known is
    /// judged by the name of its address.
    pub(super) fn stays_where_it_is(&self, slot: u32) -> bool {
        let Some(Slot::Tcp(flow)) = self.slots.get(slot as usize) else {
            return true;
        };
        let name = flow.name();
        match (flow.is_brokered, name) {
            (true, Some(host)) => {
                let port = flow.key.port;
                self.brokered.contains(&HostPort { host, port })
            }
            (true, None) => false,
            (false, Some(host)) if flow.key.protocol == Protocol::Tcp && flow.is_open() => {
                !self.has_secret(&host)
            }
            (false, _) => true,
        }
    }
}
