//! Verdicts: whether a flow of a guest is allowed.
//!
//! Rules are tried in their order, then the mode decides. An address outside the group `public` is *restricted*: a rule
//! allows it only if the rule names it, which means by its group, or by a range that lies wholly in its group. So
//! `allow 0.0.0.0/0` opens no metadata service, and `allow 169.254.169.254` does.
//!
//! A rule about a name matches if the resolver of this sandbox gave the address for such a name (a *pin*) and the client
//! also names it in its first bytes. Before those bytes came, the verdict is [`Decision::Undecided`].

use std::net::{IpAddr, Ipv4Addr};

use forkd_net_proto::Reason;
use forkd_types::{Action, Cidr, DomainName, Group, Mode, Policy, Protocol, Rule, Target};

use crate::HostAddresses;

const PRIVATE: [Cidr; 5] = [
    Cidr::v4([10, 0, 0, 0], 8),
    Cidr::v4([172, 16, 0, 0], 12),
    Cidr::v4([192, 168, 0, 0], 16),
    Cidr::v4([100, 64, 0, 0], 10),
    Cidr::v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7),
];
const METADATA: [Cidr; 4] = [
    Cidr::v4([169, 254, 169, 254], 32),
    Cidr::v4([100, 100, 100, 200], 32),
    Cidr::v4([192, 0, 0, 192], 32),
    Cidr::v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128),
];
const LOOPBACK: [Cidr; 3] = [
    Cidr::v4([127, 0, 0, 0], 8),
    Cidr::v4([0, 0, 0, 0], 8),
    Cidr::v6([0, 0, 0, 0, 0, 0, 0, 1], 128),
];
const RESERVED: [Cidr; 8] = [
    Cidr::v4([169, 254, 0, 0], 16),
    Cidr::v4([192, 0, 0, 0], 24),
    Cidr::v4([198, 18, 0, 0], 15),
    Cidr::v4([224, 0, 0, 0], 4),
    Cidr::v4([240, 0, 0, 0], 4),
    Cidr::v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
    Cidr::v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8),
    Cidr::v6([0, 0, 0, 0, 0, 0, 0, 0], 128),
];

/// The group of an address. An IPv6 form of an IPv4 address is judged by the IPv4 address.
pub fn group_of(address: IpAddr, host: &HostAddresses) -> Group {
    let address = plain(address);
    let any = |ranges: &[Cidr]| ranges.iter().any(|range| range.contains(address));
    if any(&METADATA) {
        Group::Metadata
    } else if any(&LOOPBACK) || host.contains(address) {
        Group::Host
    } else if any(&RESERVED) {
        Group::Reserved
    } else if any(&PRIVATE) {
        Group::Private
    } else {
        Group::Public
    }
}

/// Takes an IPv4 address out of the IPv6 forms that carry one: mapped, NAT64, 6to4.
fn plain(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else {
        return address;
    };
    let last = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    };
    match v6.segments() {
        [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            last(high, low)
        }
        [0x2002, high, low, ..] => last(high, low),
        _ => address,
    }
}

/// The range lies wholly in the group.
fn is_within(range: &Cidr, group: Group, host: &HostAddresses) -> bool {
    let any = |ranges: &[Cidr]| ranges.iter().any(|outer| outer.covers(range));
    match group {
        Group::Public => true,
        Group::Private => any(&PRIVATE),
        Group::Metadata => any(&METADATA),
        Group::Reserved => any(&RESERVED),
        Group::Host => {
            any(&LOOPBACK)
                || *range == Cidr::single(range.address()) && host.contains(range.address())
        }
    }
}

/// The facts about a flow that a verdict depends on.
#[derive(Debug, Clone, Copy)]
pub struct Flow<'a> {
    pub address: IpAddr,
    pub port: u16,
    pub protocol: Protocol,
    /// The names for which the resolver gave the address.
    pub pins: &'a [DomainName],
    pub said: Said<'a>,
}

/// The host that the client named in its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said<'a> {
    /// Its first bytes have not come.
    NotYet,
    /// Its protocol names no host.
    Nothing,
    /// Its protocol should name a host, and the client named none.
    Hidden,
    Name(&'a DomainName),
}

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    Allow(Reason),
    Deny(Reason),
    /// It depends on the first bytes of the client.
    Undecided,
}

enum Match {
    Yes,
    No,
    Unknown,
}

/// Decides about a flow. Denials of the floor, the rules of the operator, come first.
pub fn decide(floor: &[Rule], policy: &Policy, host: &HostAddresses, flow: &Flow<'_>) -> Decision {
    let group = group_of(flow.address, host);
    let mut named = false;
    for (index, rule) in floor.iter().enumerate() {
        if rule.action != Action::Deny || !rule.is_about(flow.port, flow.protocol) {
            continue;
        }
        match matches(rule, group, host, flow, &mut named) {
            Match::No => {}
            Match::Unknown => return Decision::Undecided,
            Match::Yes => {
                return Decision::Deny(Reason::Floor(u16::try_from(index).unwrap_or(u16::MAX)));
            }
        }
    }
    for (index, rule) in policy.rules().iter().enumerate() {
        if !rule.is_about(flow.port, flow.protocol) {
            continue;
        }
        let reason = Reason::Rule(u16::try_from(index).unwrap_or(u16::MAX));
        match matches(rule, group, host, flow, &mut named) {
            Match::No => {}
            Match::Unknown => return Decision::Undecided,
            Match::Yes if rule.action == Action::Allow => return Decision::Allow(reason),
            Match::Yes => return Decision::Deny(reason),
        }
    }
    let allowed = match policy.mode() {
        Mode::None | Mode::Custom => false,
        Mode::Public => group == Group::Public,
        Mode::Open => matches!(group, Group::Public | Group::Private),
    };
    match (allowed, group) {
        (true, _) => Decision::Allow(Reason::Default),
        (false, _) if named => Decision::Deny(Reason::NameMismatch),
        (false, Group::Public) => Decision::Deny(Reason::Default),
        (false, group) => Decision::Deny(Reason::Group(group)),
    }
}

/// `named` is set if a rule allows a pinned name that the client did not name.
fn matches(
    rule: &Rule,
    group: Group,
    host: &HostAddresses,
    flow: &Flow<'_>,
    named: &mut bool,
) -> Match {
    let yes = |is: bool| if is { Match::Yes } else { Match::No };
    let deny = rule.action == Action::Deny;
    match &rule.target {
        Target::Any => yes(deny || group == Group::Public),
        Target::Group(own) => yes(*own == group),
        Target::Range(range) => {
            let inside = range.contains(plain(flow.address)) || range.contains(flow.address);
            yes(inside && (deny || is_within(range, group, host)))
        }
        Target::Name(pattern) if deny => match flow.said {
            Said::Name(name) => yes(pattern.matches(name)),
            Said::NotYet if flow.protocol == Protocol::Tcp => Match::Unknown,
            _ => yes(flow.pins.iter().any(|pin| pattern.matches(pin))),
        },
        // A name opens no restricted address: the owner of the name could point it anywhere.
        Target::Name(_) if group != Group::Public => Match::No,
        Target::Name(pattern) => {
            if !flow.pins.iter().any(|pin| pattern.matches(pin)) {
                return Match::No;
            }
            if flow.protocol == Protocol::Udp {
                // QUIC hides the name, so UDP has to be asked for.
                return yes(rule.protocol == Some(Protocol::Udp));
            }
            let found = match flow.said {
                Said::NotYet => return Match::Unknown,
                Said::Nothing => true,
                Said::Hidden => false,
                Said::Name(name) => pattern.matches(name) && flow.pins.contains(name),
            };
            *named |= !found;
            yes(found)
        }
    }
}

/// Whether a question about a name goes to the resolver, or why not. The first rule about the name decides; without one
/// the name is forwarded if the mode allows public addresses.
pub fn may_resolve(floor: &[Rule], policy: &Policy, name: &DomainName) -> Result<(), Reason> {
    let number = |index: usize| u16::try_from(index).unwrap_or(u16::MAX);
    // A denial of some ports is no denial of the name.
    let denies =
        |rule: &Rule| rule.action == Action::Deny && rule.ports.is_all() && rule.protocol.is_none();
    let about = |rule: &Rule| rule.name().is_some_and(|pattern| pattern.matches(name));
    let by_floor = floor.iter().position(|rule| about(rule) && denies(rule));
    if let Some(index) = by_floor {
        return Err(Reason::Floor(number(index)));
    }
    let mut rules = policy.rules().iter().enumerate();
    match rules.find(|(_, rule)| about(rule)) {
        Some((index, rule)) if denies(rule) => Err(Reason::Rule(number(index))),
        Some(_) => Ok(()),
        None if matches!(policy.mode(), Mode::Public | Mode::Open) => Ok(()),
        None => Err(Reason::Default),
    }
}

/// Whether an address may stand in an answer of the resolver: one that no flow could reach is removed, so that a public
/// name cannot point into a private network.
pub fn may_answer(policy: &Policy, host: &HostAddresses, address: IpAddr) -> bool {
    let group = group_of(address, host);
    match (group, policy.mode()) {
        (Group::Public, _) | (Group::Private, Mode::Open) => true,
        _ => policy.rules().iter().any(|rule| {
            rule.action == Action::Allow
                && match &rule.target {
                    Target::Group(own) => *own == group,
                    Target::Range(range) => {
                        range.contains(address) && is_within(range, group, host)
                    }
                    Target::Any | Target::Name(_) => false,
                }
        }),
    }
}

#[cfg(test)]
mod tests;
