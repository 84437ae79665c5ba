//! The protocol between the controller and `forkd-net`, the network engine of a host.
//!
//! The two share a `SOCK_SEQPACKET` Unix socket: a packet is one message, encoded with postcard, and descriptors travel
//! with it as `SCM_RIGHTS`. The first request on a connection is [`NetCommand::Hello`]. Every request is answered by one
//! [`FromNet::Response`] with its number; [`FromNet::Ended`] and [`FromNet::Denied`] come unasked.
//!
//! ```text
//!   (unknown) ──Attach──► attached ──Detach, end of the VMM, failure──► (unknown)
//!                          │    ▲
//!                          └────┘ Attach again (new frame socket), SetPolicy, Reset
//! ```
//!
//! Sandboxes stay attached when the controller goes away. The next controller compares [`NetCommand::List`] with its
//! records.
//!
//! [`broker`] is the protocol of `forkd-broker`, which adds secrets to requests of guests.

pub mod broker;
mod flow;

use std::net::{IpAddr, SocketAddr};

use forkd_types::{HostPort, Policy, Rule, SandboxId};
pub use forkd_vmm_proto::{FdIndex, MAX_MESSAGE, WireError, decode, encode};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use flow::{FlowRecord, NetCounters, OpenFlow, Reason, Verdict};

/// The version that both sides name in their hello.
pub const NET_VERSION: u32 = 3;

/// The address of every guest, with the length of its prefix.
pub const GUEST_ADDRESS: [u8; 4] = [10, 42, 0, 2];
/// The address at which the engine is router and resolver of every guest.
pub const GATEWAY_ADDRESS: [u8; 4] = [10, 42, 0, 1];
/// The length of the prefix of both addresses.
pub const GUEST_PREFIX: u8 = 24;

/// The most entries in an answer: entries are bounded, so that an answer fits into one message.
pub const MAX_ENTRIES: usize = 128;
/// The most IDs in an answer to [`NetCommand::List`].
pub const MAX_IDS: usize = 512;

/// A command with the number that its answer carries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetRequest {
    pub seq: u64,
    pub command: NetCommand,
}

/// A command of the controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetCommand {
    /// The first message on a connection.
    Hello { version: u32 },
    /// Replaces the settings of the operator.
    Configure {
        /// Rules that are tried before the rules of every policy. Only denials have an effect. Flows that they deny end
        /// before the answer.
        floor: Vec<Rule>,
        /// Name servers for the guests; without any, those that the engine was started with or those of the host.
        resolvers: Vec<SocketAddr>,
    },
    /// Serves a sandbox. If the sandbox is attached already, the new frame socket replaces the old one and every flow
    /// ends.
    Attach {
        id: SandboxId,
        policy: Policy,
        /// Hosts whose TLS connections go to the broker of secrets, and nowhere else.
        brokered: Vec<HostPort>,
        /// Changes with every policy of the sandbox.
        generation: u64,
        /// One end of a `SOCK_SEQPACKET` pair; the VMM has the other end.
        frames: FdIndex,
    },
    /// Replaces the policy. Flows that the new policy does not allow end before the answer.
    SetPolicy {
        id: SandboxId,
        policy: Policy,
        brokered: Vec<HostPort>,
        generation: u64,
    },
    /// Sends flows to brokered hosts to this broker from now on. Flows that an earlier broker has stay with it.
    SetBroker {
        /// One end of a `SOCK_SEQPACKET` pair; the broker has the other end.
        link: FdIndex,
    },
    /// Ends every flow. Both ends of each TCP connection get a reset.
    Reset { id: SandboxId },
    /// Ends the network of a sandbox. An unknown ID is no error.
    Detach { id: SandboxId },
    /// Asks for the counters of one sandbox.
    Stats { id: SandboxId },
    /// Asks for the sum of the counters of all sandboxes since the engine started.
    Totals,
    /// Asks for open flows: at most [`MAX_ENTRIES`].
    Flows { id: SandboxId },
    /// Asks for entries of the flow log after a number: at most [`MAX_ENTRIES`].
    Log { id: SandboxId, after: u64 },
    /// Asks for attached sandboxes in the order of their IDs: at most [`MAX_IDS`].
    List { after: Option<SandboxId> },
}

impl NetCommand {
    /// The sandbox that the command is about.
    pub fn sandbox(&self) -> Option<&SandboxId> {
        match self {
            Self::Attach { id, .. }
            | Self::SetPolicy { id, .. }
            | Self::Reset { id }
            | Self::Detach { id }
            | Self::Stats { id }
            | Self::Flows { id }
            | Self::Log { id, .. } => Some(id),
            Self::Hello { .. }
            | Self::Configure { .. }
            | Self::SetBroker { .. }
            | Self::Totals
            | Self::List { .. } => None,
        }
    }
}

/// A message from the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromNet {
    Response {
        /// The number of the request.
        seq: u64,
        result: Result<NetReply, NetError>,
    },
    /// The network of a sandbox ended without a `Detach`.
    Ended { id: SandboxId, why: EndCause },
    /// A flow was denied. At most one message per second and sandbox; the flow log has every denial.
    Denied {
        id: SandboxId,
        flow: FlowRecord,
        /// Denials since the last message that have none of their own.
        suppressed: u64,
    },
}

/// Why the network of a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndCause {
    /// The VMM closed its end of the frame socket.
    Closed,
    /// The engine failed while it served this sandbox.
    Failed,
}

/// The result of a command that succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetReply {
    Hello {
        version: u32,
        program: String,
        /// The name servers that questions of guests are forwarded to.
        resolvers: Vec<IpAddr>,
        walls: NetWalls,
    },
    Done,
    Stats(NetStats),
    Totals {
        counters: NetCounters,
        sandboxes: u32,
    },
    Flows {
        flows: Vec<OpenFlow>,
        /// Open flows in all, listed or not.
        count: u32,
    },
    Log {
        entries: Vec<FlowRecord>,
        /// Entries after `after` that the ring no longer had.
        lost: u64,
        /// The number of the newest entry; 0 without any.
        last: u64,
    },
    List {
        ids: Vec<SandboxId>,
        /// There are more after the last one.
        more: bool,
    },
}

/// A wall between the engine and its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetWall {
    /// The engine has a user ID of its own.
    User,
    /// The engine has no capability and can get none.
    Capabilities,
    /// The engine is denied paths, ports to listen on, and signals to others.
    Landlock,
    /// The engine is limited to the system calls that it needs.
    Seccomp,
}

impl NetWall {
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Capabilities => "capabilities",
            Self::Landlock => "landlock",
            Self::Seccomp => "seccomp",
        }
    }
}

/// The walls around the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetWalls {
    pub standing: Vec<NetWall>,
    pub missing: Vec<MissingWall>,
}

impl NetWalls {
    /// Whether the wall stands; without a wall, no.
    pub fn stands(&self, wall: Option<NetWall>) -> bool {
        wall.is_some_and(|wall| self.standing.contains(&wall))
    }
}

/// A wall that does not stand, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingWall {
    pub wall: NetWall,
    pub reason: String,
}

/// The state of one sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetStats {
    /// The generation of the policy in force.
    pub generation: u64,
    pub counters: NetCounters,
    /// TCP and UDP flows that are open.
    pub open: u32,
}

/// Why a command was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum NetError {
    #[error("forkd-net speaks version {ours}, the controller {theirs}")]
    Version { ours: u32, theirs: u32 },
    #[error("the first message must be a hello")]
    NoHello,
    #[error("sandbox {id} is not attached")]
    Unknown { id: SandboxId },
    #[error("the message lacks its descriptor")]
    NoDescriptor,
    #[error("the frame socket cannot be used: {reason}")]
    Socket { reason: String },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_policy_fits_into_a_message() {
        let label = "a".repeat(60);
        let name = format!("{label}.{label}.{label}.{label}.example");
        let rule: forkd_types::Rule = format!("allow *.{name}:1,3,5,7,9,11,13,15")
            .parse()
            .unwrap();
        let rules = vec![rule; forkd_types::MAX_RULES];
        let policy = Policy::new(forkd_types::Mode::Custom, rules, Default::default()).unwrap();
        let request = NetRequest {
            seq: u64::MAX,
            command: NetCommand::SetPolicy {
                id: "sb-0000000000000000".parse().unwrap(),
                policy,
                brokered: vec![
                    format!("{name}:65535").parse().unwrap();
                    forkd_types::MAX_INJECTIONS
                ],
                generation: u64::MAX,
            },
        };
        let packet = encode(&request).unwrap();
        assert_eq!(decode::<NetRequest>(&packet).unwrap(), request);
    }

    #[test]
    fn the_largest_log_fits_into_a_message() {
        let entries = vec![flow::tests::largest(); MAX_ENTRIES];
        let answer = FromNet::Response {
            seq: u64::MAX,
            result: Ok(NetReply::Log {
                entries,
                lost: 0,
                last: u64::MAX,
            }),
        };
        assert_eq!(
            decode::<FromNet>(&encode(&answer).unwrap()).unwrap(),
            answer
        );
    }

    proptest::proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..512)) {
            let _ = decode::<NetRequest>(&bytes);
            let _ = decode::<FromNet>(&bytes);
        }
    }
}
