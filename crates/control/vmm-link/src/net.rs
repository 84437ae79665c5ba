//! The client of `forkd-net`, the network engine of the host.
//!
//! [`NetEngine`] asks, [`NetNews`] receives what the engine reports by itself: sandboxes whose network ended, and denied
//! connections. A frame socket is a `SOCK_SEQPACKET` pair ([`frame_pair`]): the VMM has one end, the engine the other.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use forkd_net_proto::{
    EndCause, FdIndex, FlowRecord, FromNet, NET_VERSION, NetCommand, NetCounters, NetError,
    NetReply, NetRequest, NetStats, NetWalls, OpenFlow,
};
use forkd_types::{HostPort, Policy, Rule, SandboxId};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::link::{Incoming, Link, LinkError, Unasked};
use crate::spawner::{dial, end_listener};

/// The name that the kernel has for the process of the engine.
const PROGRAM: &str = "forkd-net";
/// The buffer of each end of a frame socket. It bounds the kernel memory of a sandbox.
const FRAME_BUFFER: usize = 1 << 20;

/// Why the network engine did not carry out a request.
#[derive(Debug, Error)]
pub enum NetEngineError {
    /// No engine listens at the path, and none could be started.
    #[error("no forkd-net answers on {}", path.display())]
    Connect {
        /// The socket or the program.
        path: PathBuf,
        /// The failure of the system.
        #[source]
        source: io::Error,
    },
    /// The connection failed.
    #[error("forkd-net does not answer")]
    Link(#[from] LinkError),
    /// The engine refused the request.
    #[error("forkd-net refused")]
    Refused(#[source] NetError),
    /// The engine gave an answer to another question.
    #[error("forkd-net gave an answer that does not fit: {reply:?}")]
    Unexpected { reply: Box<NetReply> },
}

impl Incoming for FromNet {
    fn answers(&self) -> Option<u64> {
        match self {
            Self::Response { seq, .. } => Some(*seq),
            Self::Ended { .. } | Self::Denied { .. } => None,
        }
    }

    /// A guest makes as many denials as it likes.
    fn is_guest_made(&self) -> bool {
        matches!(self, Self::Denied { .. })
    }

    fn max_fds(&self) -> usize {
        0
    }

    /// The networks of all sandboxes of a host may end at once.
    const MAX_WAITING: usize = 1 << 16;
}

/// A connected pair of frame sockets: the first end is for the VMM, the second for the engine.
pub fn frame_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (vmm, engine) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    for end in [&vmm, &engine] {
        sockopt::set_socket_send_buffer_size(end, FRAME_BUFFER)?;
    }
    Ok((vmm, engine))
}

/// Ends the engine that listens at the path, and with it every connection of every sandbox.
pub fn end_net_engine(path: &Path) -> io::Result<()> {
    end_listener(path, PROGRAM)
}

/// A part of the flow log of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogPage {
    /// The oldest entries after the number that was asked for.
    pub entries: Vec<FlowRecord>,
    /// Entries between that number and the first one that are lost.
    pub lost: u64,
    /// The number of the newest entry. A smaller number than that of a known entry means that the log began anew.
    pub last: u64,
}

/// A connection to the network engine.
#[derive(Debug)]
pub struct NetEngine {
    link: Link<FromNet>,
    resolvers: Vec<IpAddr>,
    walls: NetWalls,
}

impl NetEngine {
    /// Connects and greets. Reports of the engine go to the returned stream.
    pub async fn connect(path: &Path) -> Result<(Self, NetNews), NetEngineError> {
        let failed = |source: io::Error| NetEngineError::Connect {
            path: path.to_owned(),
            source,
        };
        let socket = dial(path).map_err(failed)?;
        let (link, receiver) = Link::new(socket, 1).map_err(failed)?;
        let mut engine = Self {
            link,
            resolvers: Vec::new(),
            walls: NetWalls::default(),
        };
        let hello = NetCommand::Hello {
            version: NET_VERSION,
        };
        match engine.ask(hello, None).await? {
            NetReply::Hello {
                resolvers, walls, ..
            } => {
                engine.resolvers = resolvers;
                engine.walls = walls;
                Ok((engine, NetNews { receiver }))
            }
            reply => Err(unexpected(reply)),
        }
    }

    /// The name servers of the host, as the engine found them when it was greeted.
    pub fn resolvers(&self) -> &[IpAddr] {
        &self.resolvers
    }

    /// The walls around the engine.
    pub fn walls(&self) -> &NetWalls {
        &self.walls
    }

    /// Replaces the settings of the operator.
    pub async fn configure(
        &self,
        floor: Vec<Rule>,
        resolvers: Vec<SocketAddr>,
    ) -> Result<(), NetEngineError> {
        self.done(NetCommand::Configure { floor, resolvers }, None)
            .await
    }

    /// Serves a sandbox through a new frame socket; connections of an earlier socket end.
    pub async fn attach(
        &self,
        id: &SandboxId,
        policy: Policy,
        generation: u64,
        frames: &OwnedFd,
    ) -> Result<(), NetEngineError> {
        let (policy, brokered) = for_engine(policy);
        let attach = NetCommand::Attach {
            id: id.clone(),
            policy,
            brokered,
            generation,
            frames: FdIndex(0),
        };
        self.done(attach, Some(frames)).await
    }

    /// Puts a policy in force. Connections that it does not allow are reset before the answer.
    pub async fn set_policy(
        &self,
        id: &SandboxId,
        policy: Policy,
        generation: u64,
    ) -> Result<(), NetEngineError> {
        let (policy, brokered) = for_engine(policy);
        let set = NetCommand::SetPolicy {
            id: id.clone(),
            policy,
            brokered,
            generation,
        };
        self.done(set, None).await
    }

    /// Sends connections to hosts with an injection to the broker at the other end of this link.
    pub async fn set_broker(&self, link: &OwnedFd) -> Result<(), NetEngineError> {
        let command = NetCommand::SetBroker { link: FdIndex(0) };
        self.done(command, Some(link)).await
    }

    /// Ends every connection of a sandbox.
    pub async fn reset(&self, id: &SandboxId) -> Result<(), NetEngineError> {
        self.done(NetCommand::Reset { id: id.clone() }, None).await
    }

    /// Ends the network of a sandbox. An unknown ID is no error.
    pub async fn detach(&self, id: &SandboxId) -> Result<(), NetEngineError> {
        self.done(NetCommand::Detach { id: id.clone() }, None).await
    }

    /// The state of one sandbox; `None` if the engine does not serve it.
    pub async fn stats(&self, id: &SandboxId) -> Result<Option<NetStats>, NetEngineError> {
        match self.ask(NetCommand::Stats { id: id.clone() }, None).await {
            Ok(NetReply::Stats(stats)) => Ok(Some(stats)),
            Ok(reply) => Err(unexpected(reply)),
            Err(NetEngineError::Refused(NetError::Unknown { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The sum of all counters since the engine started, and the number of sandboxes.
    pub async fn totals(&self) -> Result<(NetCounters, u32), NetEngineError> {
        match self.ask(NetCommand::Totals, None).await? {
            NetReply::Totals {
                counters,
                sandboxes,
            } => Ok((counters, sandboxes)),
            reply => Err(unexpected(reply)),
        }
    }

    /// Open flows of a sandbox, as many as an answer holds.
    pub async fn flows(&self, id: &SandboxId) -> Result<Vec<OpenFlow>, NetEngineError> {
        match self.ask(NetCommand::Flows { id: id.clone() }, None).await? {
            NetReply::Flows { flows, .. } => Ok(flows),
            reply => Err(unexpected(reply)),
        }
    }

    /// Entries of the flow log after a number.
    pub async fn log(&self, id: &SandboxId, after: u64) -> Result<LogPage, NetEngineError> {
        let id = id.clone();
        match self.ask(NetCommand::Log { id, after }, None).await? {
            NetReply::Log {
                entries,
                lost,
                last,
            } => Ok(LogPage {
                entries,
                lost,
                last,
            }),
            reply => Err(unexpected(reply)),
        }
    }

    /// The IDs of all sandboxes that the engine serves.
    pub async fn list(&self) -> Result<Vec<SandboxId>, NetEngineError> {
        let mut all: Vec<SandboxId> = Vec::new();
        loop {
            let after = all.last().cloned();
            match self.ask(NetCommand::List { after }, None).await? {
                NetReply::List { ids, more } => {
                    let got = !ids.is_empty();
                    all.extend(ids);
                    if !(more && got) {
                        return Ok(all);
                    }
                }
                reply => return Err(unexpected(reply)),
            }
        }
    }

    async fn done(&self, command: NetCommand, fd: Option<&OwnedFd>) -> Result<(), NetEngineError> {
        match self.ask(command, fd).await? {
            NetReply::Done => Ok(()),
            reply => Err(unexpected(reply)),
        }
    }

    async fn ask(
        &self,
        command: NetCommand,
        fd: Option<&OwnedFd>,
    ) -> Result<NetReply, NetEngineError> {
        let fds: Vec<_> = fd.into_iter().map(AsFd::as_fd).collect();
        let (answer, _) = self
            .link
            .ask(|seq| NetRequest { seq, command }, &fds)
            .await?;
        match answer {
            FromNet::Response { result, .. } => result.map_err(NetEngineError::Refused),
            FromNet::Ended { .. } | FromNet::Denied { .. } => Err(LinkError::Closed.into()),
        }
    }
}

/// The part of a policy that the engine enforces, and the hosts that it leaves to the broker. The engine never learns
/// which secret is meant.
fn for_engine(policy: Policy) -> (Policy, Vec<HostPort>) {
    let mut brokered: Vec<HostPort> = policy.inject().iter().map(|rule| rule.to.clone()).collect();
    brokered.sort();
    brokered.dedup();
    (policy.without_inject(), brokered)
}

/// A report of the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NetEvent {
    /// The network of a sandbox ended.
    Ended { id: SandboxId, why: EndCause },
    /// A connection was denied.
    Denied {
        id: SandboxId,
        /// The entry of the flow log.
        flow: FlowRecord,
        /// Denials before this one that were not reported.
        suppressed: u64,
    },
}

/// Reports of the engine, in their order.
#[derive(Debug)]
pub struct NetNews {
    receiver: mpsc::UnboundedReceiver<Unasked<FromNet>>,
}

impl NetNews {
    /// The next report; `None` once the engine is gone.
    pub async fn next(&mut self) -> Option<NetEvent> {
        loop {
            return Some(match self.receiver.recv().await?.message {
                FromNet::Ended { id, why } => NetEvent::Ended { id, why },
                FromNet::Denied {
                    id,
                    flow,
                    suppressed,
                } => NetEvent::Denied {
                    id,
                    flow,
                    suppressed,
                },
                FromNet::Response { .. } => continue,
            });
        }
    }
}

fn unexpected(reply: NetReply) -> NetEngineError {
    NetEngineError::Unexpected {
        reply: Box::new(reply),
    }
}
