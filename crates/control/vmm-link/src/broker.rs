//! The client of `forkd-broker`, the broker of secrets of the host.
//!
//! [`Broker`] asks, [`BrokerNews`] receives the refusals that the broker reports by itself.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use forkd_net_proto::broker::{
    Authority, BROKER_VERSION, BrokerCommand, BrokerCounters, BrokerError, BrokerReply,
    BrokerRequest, BrokerRule, FromBroker, Refusal, WireValue,
};
use forkd_net_proto::{FdIndex, NetWalls};
use forkd_types::{HostPort, SandboxId, SecretName, SecretValue};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::link::{Incoming, Link, LinkError, Unasked};
use crate::spawner::{dial, end_listener};

/// The name that the kernel has for the process of the broker.
const PROGRAM: &str = "forkd-broker";

/// Why the broker did not carry out a request.
#[derive(Debug, Error)]
pub enum BrokerCallError {
    /// No broker listens at the path, and none could be started.
    #[error("no forkd-broker answers on {}", path.display())]
    Connect {
        /// The socket or the program.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The connection failed.
    #[error("forkd-broker does not answer")]
    Link(#[from] LinkError),
    /// The broker refused the request.
    #[error("forkd-broker refused")]
    Refused(#[source] BrokerError),
    /// The broker gave an answer to another question.
    #[error("forkd-broker gave an answer that does not fit")]
    Unexpected,
}

impl Incoming for FromBroker {
    fn answers(&self) -> Option<u64> {
        match self {
            Self::Response { seq, .. } => Some(*seq),
            Self::Refused { .. } => None,
        }
    }

    /// A guest makes as many refusals as it likes.
    fn is_guest_made(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }

    fn max_fds(&self) -> usize {
        0
    }

    const MAX_WAITING: usize = 1 << 12;
}

/// A connected pair for an engine and a broker.
pub fn broker_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Ends the broker that listens at the path, and with it every connection through it.
pub fn end_broker(path: &Path) -> io::Result<()> {
    end_listener(path, PROGRAM)
}

/// A connection to the broker.
#[derive(Debug)]
pub struct Broker {
    link: Link<FromBroker>,
    walls: NetWalls,
}

impl Broker {
    /// Connects and greets. Reports of the broker go to the returned stream.
    pub async fn connect(path: &Path) -> Result<(Self, BrokerNews), BrokerCallError> {
        let failed = |source: io::Error| BrokerCallError::Connect {
            path: path.to_owned(),
            source,
        };
        let socket = dial(path).map_err(failed)?;
        let (link, receiver) = Link::new(socket, 1).map_err(failed)?;
        let mut broker = Self {
            link,
            walls: NetWalls::default(),
        };
        let version = BROKER_VERSION;
        match broker.ask(BrokerCommand::Hello { version }, None).await? {
            BrokerReply::Hello { walls, .. } => {
                broker.walls = walls;
                Ok((broker, BrokerNews { receiver }))
            }
            _ => Err(BrokerCallError::Unexpected),
        }
    }

    /// The walls around the broker.
    pub fn walls(&self) -> &NetWalls {
        &self.walls
    }

    /// Sets the certificate authority and returns the one in force: a broker that has one keeps it.
    pub async fn authority(&self, kept: Option<Authority>) -> Result<Authority, BrokerCallError> {
        match self.ask(BrokerCommand::Authority { kept }, None).await? {
            BrokerReply::Authority(authority) => Ok(authority),
            _ => Err(BrokerCallError::Unexpected),
        }
    }

    /// Takes connections from the engine at the other end of this link.
    pub async fn engine(&self, link: &OwnedFd) -> Result<(), BrokerCallError> {
        let command = BrokerCommand::Engine { link: FdIndex(0) };
        self.done(command, Some(link)).await
    }

    /// Sets the value of a secret. The broker keeps it only if a rule names it.
    pub async fn set_secret(
        &self,
        owner: &str,
        name: SecretName,
        value: SecretValue,
    ) -> Result<(), BrokerCallError> {
        let command = BrokerCommand::SetSecret {
            owner: owner.to_owned(),
            name,
            value: WireValue(value),
        };
        self.done(command, None).await
    }

    pub async fn remove_secret(
        &self,
        owner: &str,
        name: SecretName,
    ) -> Result<(), BrokerCallError> {
        let owner = owner.to_owned();
        self.done(BrokerCommand::RemoveSecret { owner, name }, None)
            .await
    }

    /// Replaces the rules of a sandbox.
    pub async fn set_rules(
        &self,
        id: &SandboxId,
        owner: &str,
        rules: Vec<BrokerRule>,
    ) -> Result<(), BrokerCallError> {
        let command = BrokerCommand::SetRules {
            id: id.clone(),
            owner: owner.to_owned(),
            rules,
        };
        self.done(command, None).await
    }

    /// Counters since the broker started.
    pub async fn totals(&self) -> Result<BrokerCounters, BrokerCallError> {
        match self.ask(BrokerCommand::Totals, None).await? {
            BrokerReply::Totals(counters) => Ok(counters),
            _ => Err(BrokerCallError::Unexpected),
        }
    }

    /// The IDs of all sandboxes that have rules.
    pub async fn list(&self) -> Result<Vec<SandboxId>, BrokerCallError> {
        let mut all: Vec<SandboxId> = Vec::new();
        loop {
            let after = all.last().cloned();
            match self.ask(BrokerCommand::List { after }, None).await? {
                BrokerReply::List { ids, more } => {
                    let got = !ids.is_empty();
                    all.extend(ids);
                    if !(more && got) {
                        return Ok(all);
                    }
                }
                _ => return Err(BrokerCallError::Unexpected),
            }
        }
    }

    async fn done(
        &self,
        command: BrokerCommand,
        fd: Option<&OwnedFd>,
    ) -> Result<(), BrokerCallError> {
        match self.ask(command, fd).await? {
            BrokerReply::Done => Ok(()),
            _ => Err(BrokerCallError::Unexpected),
        }
    }

    async fn ask(
        &self,
        command: BrokerCommand,
        fd: Option<&OwnedFd>,
    ) -> Result<BrokerReply, BrokerCallError> {
        let fds: Vec<_> = fd.into_iter().map(AsFd::as_fd).collect();
        let (answer, _) = self
            .link
            .ask(|seq| BrokerRequest { seq, command }, &fds)
            .await?;
        match answer {
            FromBroker::Response { result, .. } => result.map_err(BrokerCallError::Refused),
            FromBroker::Refused { .. } => Err(LinkError::Closed.into()),
        }
    }
}

/// A request of a guest that the broker refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub id: SandboxId,
    pub to: HostPort,
    pub reason: Refusal,
    /// Refusals before this one that were not reported.
    pub suppressed: u64,
}

/// Reports of the broker, in their order.
#[derive(Debug)]
pub struct BrokerNews {
    receiver: mpsc::UnboundedReceiver<Unasked<FromBroker>>,
}

impl BrokerNews {
    /// The next refusal; `None` once the broker is gone.
    pub async fn next(&mut self) -> Option<Refused> {
        loop {
            if let FromBroker::Refused {
                id,
                to,
                reason,
                suppressed,
            } = self.receiver.recv().await?.message
            {
                return Some(Refused {
                    id,
                    to,
                    reason,
                    suppressed,
                });
            }
        }
    }
}
