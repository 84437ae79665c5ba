//! Flows, as the controller gets to see them.

use std::net::IpAddr;

use forkd_types::Protocol;
use serde::{Deserialize, Serialize};

/// The verdict on a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    Allowed,
    Denied,
}

/// Why a flow was allowed, denied or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// The rule at this place, counted from 0, matched.
    Rule(u16),
    /// The rule of the operator at this place, counted from 0, matched.
    Floor(u16),
    /// No rule matched, and the mode of the policy decided.
    Default,
    /// The address is in a group that only a rule can allow.
    Group(forkd_types::Group),
    /// A rule allows the name, and the client named another one or none.
    NameMismatch,
    /// Too many flows are open, or too many were opened in a second.
    Limit,
    /// The destination refused or did not answer.
    Unreachable,
    /// The guest has sent as many bytes as it may in all.
    Quota,
    /// A host with an injected secret is reached by its name, over TLS, on the port of the injection, and in no other
    /// way.
    SecretHost,
    /// The broker of secrets does not take the connection.
    NoBroker,
}

/// An entry of the flow log. Written when a flow is denied or when it ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowRecord {
    /// Entries of one sandbox are numbered from 1.
    pub number: u64,
    pub unix_ms: u64,
    /// The generation of the policy that decided; [`Reason::Rule`] counts the rules of that one.
    pub generation: u64,
    pub protocol: Protocol,
    pub address: IpAddr,
    pub port: u16,
    /// The name by which the guest found the address.
    pub name: Option<String>,
    pub verdict: Verdict,
    pub reason: Reason,
    /// Bytes from the guest.
    pub up: u64,
    /// Bytes to the guest.
    pub down: u64,
    pub duration_ms: u64,
}

/// A flow that is open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFlow {
    pub protocol: Protocol,
    pub address: IpAddr,
    pub port: u16,
    pub name: Option<String>,
    pub up: u64,
    pub down: u64,
    pub age_ms: u64,
}

/// Counters since the sandbox was attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetCounters {
    /// Bytes of payload from the guest.
    pub bytes_up: u64,
    /// Bytes of payload to the guest.
    pub bytes_down: u64,
    pub frames_up: u64,
    pub frames_down: u64,
    /// Frames that are invalid, of another protocol, or did not fit into a queue.
    pub frames_dropped: u64,
    /// Flows that were allowed.
    pub flows: u64,
    /// Flows that the policy or a limit denied.
    pub denied: u64,
    pub dns: u64,
    /// Questions that the policy or a limit did not let through.
    pub dns_denied: u64,
    /// Segments of unknown flows that were answered with a reset.
    pub resets: u64,
    /// Waits of connections and lost datagrams, because of a limit on the rate.
    pub limited: u64,
}

impl NetCounters {
    /// Adds another set of counters.
    pub fn add(&mut self, other: &Self) {
        self.bytes_up += other.bytes_up;
        self.bytes_down += other.bytes_down;
        self.frames_up += other.frames_up;
        self.frames_down += other.frames_down;
        self.frames_dropped += other.frames_dropped;
        self.flows += other.flows;
        self.denied += other.denied;
        self.dns += other.dns;
        self.dns_denied += other.dns_denied;
        self.resets += other.resets;
        self.limited += other.limited;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// No entry is larger.
    pub fn largest() -> FlowRecord {
        FlowRecord {
            number: u64::MAX,
            unix_ms: u64::MAX,
            generation: u64::MAX,
            protocol: Protocol::Udp,
            address: IpAddr::V6([0xff; 16].into()),
            port: u16::MAX,
            name: Some("a".repeat(253)),
            verdict: Verdict::Denied,
            reason: Reason::Rule(u16::MAX),
            up: u64::MAX,
            down: u64::MAX,
            duration_ms: u64::MAX,
        }
    }
}
