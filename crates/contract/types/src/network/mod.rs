//! The network policy of a sandbox: what its guest may reach.
//!
//! A [`Policy`] is a [`Mode`], a list of [`Rule`]s and [`NetLimits`]. The first rule that matches a connection decides;
//! if none matches, the mode does. Addresses of the host, of private networks, of metadata services and reserved
//! addresses are refused in every mode unless a rule names them (`open` also allows private addresses).
//!
//! Rules are text in every interface and on disk: `allow *.packages.example:443`, `deny public:25/tcp`. [`Rule`]
//! parses that text once and prints it in one canonical form.

mod cidr;
mod domain;
mod inject;
mod ports;
mod rule;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use cidr::{Cidr, InvalidCidr};
pub use domain::{DomainName, InvalidDomain, NamePattern};
pub use inject::{
    HeaderName, HostPort, InjectRule, InvalidInject, MAX_INJECTIONS, Template, TemplatePart,
    VariableName,
};
pub use ports::{InvalidPorts, PortSet};
pub use rule::{Action, Group, InvalidRule, Protocol, Rule, Target};

/// The most rules in one policy. With the longest names they still fit into one message to the network engine.
pub const MAX_RULES: usize = 200;

/// The default for connections that no rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Nothing is reachable. Such a policy has no rules.
    #[default]
    None,
    /// Public addresses are reachable.
    Public,
    /// Public and private addresses are reachable.
    Open,
    /// Only connections that a rule allows.
    Custom,
}

/// A word that is not a mode.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is not a network mode: none, public, open or custom")]
pub struct InvalidMode {
    pub text: String,
}

impl Mode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Public => "public",
            Self::Open => "open",
            Self::Custom => "custom",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Mode {
    type Err = InvalidMode;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            "public" => Ok(Self::Public),
            "open" => Ok(Self::Open),
            "custom" => Ok(Self::Custom),
            _ => Err(InvalidMode {
                text: text.chars().take(64).collect(),
            }),
        }
    }
}

/// Limits on the network of one sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetLimits {
    /// TCP connections open at one time.
    pub connections: u32,
    /// New TCP connections and UDP flows per second.
    pub new_per_second: u32,
    /// DNS questions per second.
    pub dns_per_second: u32,
    /// Megabits of payload per second from the guest; without a value no limit.
    pub egress_mbit: Option<u32>,
    /// Megabits of payload per second to the guest; without a value no limit.
    pub ingress_mbit: Option<u32>,
    /// Mebibytes of payload that the guest may send in all; without a value no limit.
    pub egress_mib_total: Option<u32>,
}

/// The largest value of [`NetLimits::connections`]: each connection is an open file of the network engine.
pub const MAX_CONNECTIONS: u32 = 4096;

impl Default for NetLimits {
    fn default() -> Self {
        Self {
            connections: 1024,
            new_per_second: 200,
            dns_per_second: 100,
            egress_mbit: None,
            ingress_mbit: None,
            egress_mib_total: None,
        }
    }
}

/// The destinations that the guest of one sandbox may reach. Valid by construction.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "UncheckedPolicy", into = "UncheckedPolicy")]
pub struct Policy {
    mode: Mode,
    rules: Vec<Rule>,
    limits: NetLimits,
    inject: Vec<InjectRule>,
}

#[derive(Serialize, Deserialize)]
struct UncheckedPolicy {
    mode: Mode,
    rules: Vec<Rule>,
    limits: NetLimits,
    inject: Vec<InjectRule>,
}

/// Why a policy is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidPolicy {
    #[error("a network policy has at most {MAX_RULES} rules, this one has {count}")]
    TooManyRules { count: usize },
    #[error("the mode none takes no rules; the mode custom allows only what a rule allows")]
    RulesWithNone,
    #[error("connections is {value}, which is not between 1 and {MAX_CONNECTIONS}")]
    Connections { value: u32 },
    #[error("{name} must not be 0")]
    Zero { name: &'static str },
    #[error("the mode none reaches no host, so no secret can be injected")]
    InjectWithNone,
    #[error(transparent)]
    Inject(#[from] InvalidInject),
}

impl Policy {
    /// Nothing is reachable.
    pub fn none() -> Self {
        Self::default()
    }

    pub fn new(mode: Mode, rules: Vec<Rule>, limits: NetLimits) -> Result<Self, InvalidPolicy> {
        if rules.len() > MAX_RULES {
            return Err(InvalidPolicy::TooManyRules { count: rules.len() });
        }
        if mode == Mode::None && !rules.is_empty() {
            return Err(InvalidPolicy::RulesWithNone);
        }
        if limits.connections == 0 || limits.connections > MAX_CONNECTIONS {
            return Err(InvalidPolicy::Connections {
                value: limits.connections,
            });
        }
        for (name, value) in [
            ("new_per_second", Some(limits.new_per_second)),
            ("dns_per_second", Some(limits.dns_per_second)),
            ("egress_mbit", limits.egress_mbit),
            ("ingress_mbit", limits.ingress_mbit),
            ("egress_mib_total", limits.egress_mib_total),
        ] {
            if value == Some(0) {
                return Err(InvalidPolicy::Zero { name });
            }
        }
        Ok(Self {
            mode,
            rules,
            limits,
            inject: Vec::new(),
        })
    }

    /// The policy with these injections in place of its own. An injection opens no host: a rule or the mode does.
    pub fn with_inject(self, inject: Vec<InjectRule>) -> Result<Self, InvalidPolicy> {
        if self.mode == Mode::None && !inject.is_empty() {
            return Err(InvalidPolicy::InjectWithNone);
        }
        inject::check(&inject)?;
        Ok(Self { inject, ..self })
    }

    /// The policy without injections, as a fork inherits it.
    pub fn without_inject(self) -> Self {
        let inject = Vec::new();
        Self { inject, ..self }
    }

    /// The headers that get a secret.
    pub fn inject(&self) -> &[InjectRule] {
        &self.inject
    }

    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// In the order in which they are tried.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    pub fn limits(&self) -> &NetLimits {
        &self.limits
    }
}

impl TryFrom<UncheckedPolicy> for Policy {
    type Error = InvalidPolicy;

    fn try_from(policy: UncheckedPolicy) -> Result<Self, Self::Error> {
        Self::new(policy.mode, policy.rules, policy.limits)?.with_inject(policy.inject)
    }
}

impl From<Policy> for UncheckedPolicy {
    fn from(policy: Policy) -> Self {
        Self {
            mode: policy.mode,
            rules: policy.rules,
            limits: policy.limits,
            inject: policy.inject,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_checked_when_they_are_read() {
        let rule = |text: &str| text.parse::<Rule>().unwrap();
        let limits = NetLimits::default();
        assert_eq!(
            Policy::new(Mode::None, vec![rule("allow public")], limits),
            Err(InvalidPolicy::RulesWithNone)
        );
        let many = vec![rule("allow public"); MAX_RULES + 1];
        assert_eq!(
            Policy::new(Mode::Custom, many, limits),
            Err(InvalidPolicy::TooManyRules {
                count: MAX_RULES + 1
            })
        );
        let text = serde_json::to_string(
            &Policy::new(Mode::Custom, vec![rule("allow a.example:443")], limits).unwrap(),
        )
        .unwrap();
        assert!(text.contains("\"allow a.example:443\""), "{text}");
        assert!(serde_json::from_str::<Policy>(&text).is_ok());
        let wrong = text.replace("custom", "none");
        assert!(serde_json::from_str::<Policy>(&wrong).is_err());
        for (field, value) in [("connections", 1024), ("dns_per_second", 100)] {
            let zero = text.replace(&format!("\"{field}\":{value}"), &format!("\"{field}\":0"));
            assert!(serde_json::from_str::<Policy>(&zero).is_err(), "{zero}");
        }
    }

    #[test]
    fn modes_have_one_spelling() {
        for mode in [Mode::None, Mode::Public, Mode::Open, Mode::Custom] {
            assert_eq!(mode.to_string().parse::<Mode>(), Ok(mode));
            assert_eq!(serde_json::to_string(&mode).unwrap(), format!("\"{mode}\""));
        }
        assert!("Public".parse::<Mode>().is_err());
    }
}
