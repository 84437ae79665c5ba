//! The protocol of `forkd-broker`, the one process that holds values of secrets.
//!
//! The controller and the broker share a `SOCK_SEQPACKET` Unix socket, as the controller and the engine do. The engine
//! and the broker share a pair that the controller made: the engine sends one [`BrokeredFlow`] per connection, with two
//! descriptors, and gets no answer.
//!
//! ```text
//!   controller ──rules, values──► forkd-broker ◄──guest's stream, connected upstream socket── forkd-net
//!                                      └──TLS, checked for the name of the rule──► upstream
//! ```

use forkd_types::{HostPort, InjectRule, SandboxId, SecretName, SecretValue};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use zeroize::Zeroizing;

use crate::{FdIndex, NetWalls};

/// The version that both sides name in their hello.
pub const BROKER_VERSION: u32 = 1;
/// Every placeholder starts with this.
pub const PLACEHOLDER: &str = "fkd_";
/// The length of a placeholder.
pub const PLACEHOLDER_LEN: usize = PLACEHOLDER.len() + 32;

/// A command with the number that its answer carries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerRequest {
    pub seq: u64,
    pub command: BrokerCommand,
}

/// A command of the controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BrokerCommand {
    /// The first message on a connection.
    Hello { version: u32 },
    /// Sets the certificate authority; without one the broker makes a new one. An authority that is set stays.
    Authority { kept: Option<Authority> },
    /// Takes flows from an engine. Earlier engines keep the flows that they have.
    Engine {
        /// One end of a `SOCK_SEQPACKET` pair; the engine has the other end.
        link: FdIndex,
    },
    /// Sets the value of a secret of an owner, if a rule names it. Requests use the new value from the answer on.
    SetSecret {
        owner: String,
        name: SecretName,
        value: WireValue,
    },
    /// Forgets the value of a secret. Requests that need it are refused.
    RemoveSecret { owner: String, name: SecretName },
    /// Replaces the rules of a sandbox. Values that no rule of any sandbox names are forgotten.
    SetRules {
        id: SandboxId,
        owner: String,
        rules: Vec<BrokerRule>,
    },
    /// Asks for the sandboxes that have rules: at most [`crate::MAX_IDS`].
    List { after: Option<SandboxId> },
    /// Asks for counters since the broker started.
    Totals,
}

/// An injection, and the placeholder that stands for its secret in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerRule {
    pub rule: InjectRule,
    /// Only this text is replaced, inside the header; without one the whole header is.
    pub placeholder: Option<String>,
}

/// A value on its way to the broker. Its `Debug` form hides it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct WireValue(pub SecretValue);

impl Serialize for WireValue {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.expose())
    }
}

/// The certificate authority of a host. Guests trust its certificate; the key never leaves broker and sealed store.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authority {
    /// The private key in PKCS#8.
    pub key: Zeroizing<Vec<u8>>,
    /// The certificate in DER.
    pub certificate: Vec<u8>,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let len = self.certificate.len();
        write!(f, "Authority(key hidden, certificate of {len} bytes)")
    }
}

/// A connection of a guest to a host that has an injection. Two descriptors come with it: the guest's stream, and a TCP
/// socket that is connected to the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokeredFlow {
    pub id: SandboxId,
    pub to: HostPort,
}

/// A message from the broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromBroker {
    Response {
        /// The number of the request.
        seq: u64,
        result: Result<BrokerReply, BrokerError>,
    },
    /// A request of a guest was refused. At most one message per second and sandbox.
    Refused {
        id: SandboxId,
        to: HostPort,
        reason: Refusal,
        /// Refusals since the last message that have none of their own.
        suppressed: u64,
    },
}

/// The result of a command that succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BrokerReply {
    Hello {
        version: u32,
        program: String,
        walls: NetWalls,
        /// The certificate of the authority, once one is set.
        certificate: Option<Vec<u8>>,
    },
    /// The authority in force.
    Authority(Authority),
    Done,
    List {
        ids: Vec<SandboxId>,
        /// There are more after the last one.
        more: bool,
    },
    Totals(BrokerCounters),
}

/// Counters since the broker started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerCounters {
    /// Connections of guests.
    pub connections: u64,
    /// Requests that went out with their secret.
    pub requests: u64,
    /// Requests and connections that were refused.
    pub refused: u64,
}

/// Why a request or connection of a guest was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Error)]
pub enum Refusal {
    #[error("the sandbox has no injection for this host")]
    NoRule,
    #[error("a secret of the injection does not exist")]
    NoSecret,
    #[error("the request does not have the placeholder in the header of the injection")]
    NoPlaceholder,
    #[error("the request has a placeholder outside the header of its injection")]
    PlaceholderElsewhere,
    #[error("the request names another host than the connection")]
    WrongHost,
    #[error("the request is not HTTP/1.1 with one clear length, or is larger than allowed")]
    NotHttp,
    #[error("the request asks for an upgrade or a tunnel")]
    Upgrade,
    #[error("the client did not complete TLS: it may not trust the certificate of this host")]
    GuestTls,
    #[error("the certificate of the destination is not valid for its name")]
    UpstreamCertificate,
    #[error("the destination did not complete TLS")]
    UpstreamTls,
    #[error("too many connections are open")]
    Limit,
}

impl Refusal {
    /// The word for the reason in answers to the guest.
    pub fn code(self) -> &'static str {
        match self {
            Self::NoRule => "no_injection",
            Self::NoSecret => "secret_missing",
            Self::NoPlaceholder => "placeholder_missing",
            Self::PlaceholderElsewhere => "placeholder_misplaced",
            Self::WrongHost => "wrong_host",
            Self::NotHttp => "not_http",
            Self::Upgrade => "upgrade_refused",
            Self::GuestTls => "client_tls",
            Self::UpstreamCertificate => "certificate_invalid",
            Self::UpstreamTls => "destination_tls",
            Self::Limit => "limit",
        }
    }
}

/// Why a command was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum BrokerError {
    #[error("forkd-broker speaks version {ours}, the controller {theirs}")]
    Version { ours: u32, theirs: u32 },
    #[error("the first message must be a hello")]
    NoHello,
    #[error("the message lacks its descriptor")]
    NoDescriptor,
    #[error("the descriptor cannot be used")]
    Socket,
    #[error("the certificate authority cannot be used")]
    Authority,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{decode, encode};

    #[test]
    fn the_largest_rules_fit_and_values_are_not_shown() {
        let label = "a".repeat(60);
        let rule = |number: usize| BrokerRule {
            rule: InjectRule {
                to: format!("{label}.{label}.{label}.a{number}:65535")
                    .parse()
                    .unwrap(),
                header: "h".repeat(64).parse().unwrap(),
                value: format!("{}${{secret:{label}}}", "v".repeat(430))
                    .parse()
                    .unwrap(),
                variable: Some("V".repeat(64).parse().unwrap()),
            },
            placeholder: Some("p".repeat(PLACEHOLDER_LEN)),
        };
        let command = BrokerCommand::SetRules {
            id: "sb-0000000000000000".parse().unwrap(),
            owner: "o".repeat(128),
            rules: (0..forkd_types::MAX_INJECTIONS).map(rule).collect(),
        };
        let request = BrokerRequest { seq: 1, command };
        let packet = encode(&request).unwrap();
        assert_eq!(decode::<BrokerRequest>(&packet).unwrap(), request);
        let command = BrokerCommand::SetSecret {
            owner: "o".into(),
            name: "n".parse().unwrap(),
            value: WireValue(SecretValue::new("sk-hidden".into()).unwrap()),
        };
        let request = BrokerRequest { seq: 1, command };
        assert!(!format!("{request:?}").contains("sk-hidden"));
        let packet = encode(&request).unwrap();
        assert_eq!(decode::<BrokerRequest>(&packet).unwrap(), request);
    }

    proptest::proptest! {
        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..512)) {
            let _ = decode::<BrokerRequest>(&bytes);
            let _ = decode::<BrokeredFlow>(&bytes);
            let _ = decode::<FromBroker>(&bytes);
        }
    }
}
