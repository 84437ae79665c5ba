//! One rule: an action, a target, ports and a protocol.
//!
//! ```text
//!   rule   = ("allow" | "deny") " " target [":" ports ["/" ("tcp" | "udp")]]
//!   target = group | address | address "/" prefix | "[" ipv6 "]" ["/" prefix] | name | "*." name | "*"
//! ```

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Cidr, InvalidCidr, InvalidDomain, InvalidPorts, NamePattern, PortSet};

/// The longest rule, in bytes.
const MAX_TEXT: usize = 512;

/// The effect of a rule on a connection that it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    Allow,
    Deny,
}

/// A transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// A kind of address. Every address belongs to exactly one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Every address that no other group has.
    Public,
    /// Networks behind a router.
    Private,
    /// Services that hand out the credentials of a cloud machine.
    Metadata,
    /// The host that runs the sandbox.
    Host,
    /// Link-local, multicast, benchmark and unassigned addresses.
    Reserved,
}

impl Group {
    pub const ALL: [Self; 5] = [
        Self::Public,
        Self::Private,
        Self::Metadata,
        Self::Host,
        Self::Reserved,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Private => "private",
            Self::Metadata => "metadata",
            Self::Host => "host",
            Self::Reserved => "reserved",
        }
    }
}

/// The destinations that a rule matches.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// `*`: every address.
    Any,
    Group(Group),
    Range(Cidr),
    Name(NamePattern),
}

/// A rule of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Rule {
    pub action: Action,
    pub target: Target,
    pub ports: PortSet,
    /// `None` stands for both.
    pub protocol: Option<Protocol>,
}

/// Why a text is not a rule.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidRule {
    #[error("a rule has at most {MAX_TEXT} bytes, this one has {len}")]
    TooLong { len: usize },
    #[error("a rule starts with \"allow \" or \"deny \", this one is {text:?}")]
    Action { text: String },
    #[error("the address after '[' in {text:?} has no ']' or is not an IPv6 address")]
    Bracket { text: String },
    #[error("{text:?} is not tcp or udp")]
    Protocol { text: String },
    #[error("the rule {text:?} has an invalid range of addresses")]
    Range {
        text: String,
        #[source]
        source: InvalidCidr,
    },
    #[error("the rule {text:?} has an invalid name")]
    Name {
        text: String,
        #[source]
        source: InvalidDomain,
    },
    #[error("the rule {text:?} has invalid ports")]
    Ports {
        text: String,
        #[source]
        source: InvalidPorts,
    },
}

impl Rule {
    /// The rule is about this port and protocol.
    pub fn is_about(&self, port: u16, protocol: Protocol) -> bool {
        self.ports.contains(port) && self.protocol.is_none_or(|own| own == protocol)
    }

    /// The pattern of a rule about names.
    pub fn name(&self) -> Option<&NamePattern> {
        match &self.target {
            Target::Name(pattern) => Some(pattern),
            _ => None,
        }
    }

    /// Parses the part of a rule after its action.
    pub fn with_action(action: Action, text: &str) -> Result<Self, InvalidRule> {
        if text.len() > MAX_TEXT {
            return Err(InvalidRule::TooLong { len: text.len() });
        }
        let (target, rest) = split_target(text)?;
        let (ports, protocol) = match rest {
            None => (PortSet::all(), None),
            Some(rest) => parse_ports(text, rest)?,
        };
        Ok(Self {
            action,
            target,
            ports,
            protocol,
        })
    }
}

fn split_target(text: &str) -> Result<(Target, Option<&str>), InvalidRule> {
    let range = |source| InvalidRule::Range {
        text: text.to_owned(),
        source,
    };
    if let Some(inner) = text.strip_prefix('[') {
        let bracket = || InvalidRule::Bracket {
            text: text.to_owned(),
        };
        let (address, rest) = inner.split_once(']').ok_or_else(bracket)?;
        if !matches!(address.parse(), Ok(IpAddr::V6(_))) {
            return Err(bracket());
        }
        let (prefix, rest) = match rest.split_once(':') {
            Some((prefix, rest)) => (prefix, Some(rest)),
            None => (rest, None),
        };
        if !prefix.is_empty() && !prefix.starts_with('/') {
            return Err(bracket());
        }
        let cidr = format!("{address}{prefix}").parse().map_err(range)?;
        return Ok((Target::Range(cidr), rest));
    }
    let (target, rest) = match text.split_once(':') {
        Some((target, rest)) => (target, Some(rest)),
        None => (text, None),
    };
    Ok((parse_target(text, target)?, rest))
}

fn parse_target(rule: &str, text: &str) -> Result<Target, InvalidRule> {
    if text == "*" {
        return Ok(Target::Any);
    }
    if let Some(group) = Group::ALL.into_iter().find(|group| group.as_str() == text) {
        return Ok(Target::Group(group));
    }
    if text.contains('/') || text.parse::<IpAddr>().is_ok() {
        let cidr = text.parse().map_err(|source| InvalidRule::Range {
            text: rule.to_owned(),
            source,
        })?;
        return Ok(Target::Range(cidr));
    }
    let name: NamePattern = text.parse().map_err(|source| InvalidRule::Name {
        text: rule.to_owned(),
        source,
    })?;
    // `Host` and `host.` are written as `host`, and would be read back as the group.
    let written = name.to_string();
    match Group::ALL
        .into_iter()
        .find(|group| group.as_str() == written)
    {
        Some(group) => Ok(Target::Group(group)),
        None => Ok(Target::Name(name)),
    }
}

fn parse_ports(rule: &str, text: &str) -> Result<(PortSet, Option<Protocol>), InvalidRule> {
    let (ports, protocol) = match text.split_once('/') {
        Some((ports, "tcp")) => (ports, Some(Protocol::Tcp)),
        Some((ports, "udp")) => (ports, Some(Protocol::Udp)),
        Some((_, other)) => {
            return Err(InvalidRule::Protocol {
                text: other.to_owned(),
            });
        }
        None => (text, None),
    };
    let ports = ports.parse().map_err(|source| InvalidRule::Ports {
        text: rule.to_owned(),
        source,
    })?;
    Ok((ports, protocol))
}

impl FromStr for Rule {
    type Err = InvalidRule;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() > MAX_TEXT {
            return Err(InvalidRule::TooLong { len: text.len() });
        }
        match text.trim().split_once(' ') {
            Some(("allow", rest)) => Self::with_action(Action::Allow, rest.trim_start()),
            Some(("deny", rest)) => Self::with_action(Action::Deny, rest.trim_start()),
            _ => Err(InvalidRule::Action {
                text: text.to_owned(),
            }),
        }
    }
}

impl TryFrom<String> for Rule {
    type Error = InvalidRule;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Rule> for String {
    fn from(rule: Rule) -> Self {
        rule.to_string()
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.action {
            Action::Allow => "allow ",
            Action::Deny => "deny ",
        })?;
        match &self.target {
            Target::Any => f.write_str("*")?,
            Target::Group(group) => f.write_str(group.as_str())?,
            Target::Range(cidr) if cidr.address().is_ipv6() => {
                write!(f, "[{}]/{}", cidr.address(), cidr.prefix())?;
            }
            Target::Range(cidr) => write!(f, "{cidr}")?,
            Target::Name(pattern) => write!(f, "{pattern}")?,
        }
        match (self.ports.is_all(), self.protocol) {
            (true, None) => Ok(()),
            (_, None) => write!(f, ":{}", self.ports),
            (_, Some(protocol)) => write!(f, ":{}/{}", self.ports, protocol.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rules_of_the_guide_are_read() {
        for text in [
            "allow *.packages.example:443",
            "allow files.packages.example:443",
            "allow 203.0.113.0/24:5432/tcp",
            "deny public:25",
            "allow host:11434",
            "allow *",
            "deny *:*/udp",
            "allow [2001:db8::]/32:80,443",
            "allow 198.51.100.7",
        ] {
            assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
        }
        let loose: Rule = "  allow   Host.EXAMPLE.:443-443,444 ".parse().unwrap();
        assert_eq!(loose.to_string(), "allow host.example:443-444");
    }

    /// A policy is stored as text, so a rule must not turn into another one when it is read back.
    #[test]
    fn a_group_is_a_group_however_it_is_written() {
        for text in ["allow Host:11434", "allow host.:11434", "allow HOST:11434"] {
            let rule: Rule = text.parse().unwrap();
            assert_eq!(rule.target, Target::Group(Group::Host), "{text}");
            assert_eq!(rule.to_string(), "allow host:11434");
        }
    }

    #[test]
    fn mistakes_are_refused() {
        for text in [
            "",
            "allow",
            "permit public",
            "allow ",
            "allow a.example:443/icmp",
            "allow a.example:",
            "allow [::1",
            "allow [1.2.3.4]",
            "allow [::1]x",
            "allow 10.0.0.1/8",
            "allow 1.2.3:80",
            "allow a.*.example",
            "allow **.example",
            "allow a b",
        ] {
            assert!(text.parse::<Rule>().is_err(), "{text:?} was accepted");
        }
        let long = format!("allow {}", "a.".repeat(400));
        assert!(matches!(
            long.parse::<Rule>(),
            Err(InvalidRule::TooLong { .. })
        ));
    }

    fn target() -> impl Strategy<Value = Target> {
        prop_oneof![
            Just(Target::Any),
            prop::sample::select(Group::ALL.to_vec()).prop_map(Target::Group),
            (any::<[u8; 4]>(), 0u8..=32).prop_map(|(o, p)| Target::Range(Cidr::v4(o, p))),
            (any::<[u16; 8]>(), 0u8..=128).prop_map(|(s, p)| Target::Range(Cidr::v6(s, p))),
            "(\\*\\.)?([a-z0-9-]{1,8}\\.){0,3}x[a-z]{1,5}"
                .prop_map(|text| Target::Name(text.parse().unwrap())),
        ]
    }

    proptest! {
        #[test]
        fn a_rule_reads_back_as_itself(
            allow: bool,
            target in target(),
            ports in prop_oneof![Just("*".to_owned()), "[1-9][0-9]{0,3}(,[1-9][0-9]{0,3}){0,5}"],
            protocol in prop::option::of(prop::sample::select(vec![Protocol::Tcp, Protocol::Udp])),
        ) {
            let action = if allow { Action::Allow } else { Action::Deny };
            let rule = Rule { action, target, ports: ports.parse().unwrap(), protocol };
            prop_assert_eq!(rule.to_string().parse::<Rule>().unwrap(), rule);
        }

        #[test]
        fn any_text_is_survived(text in "(allow|deny)? ?.{0,40}") {
            let _ = text.parse::<Rule>();
        }
    }
}
