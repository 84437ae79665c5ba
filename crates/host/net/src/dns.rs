//! The resolver of the guests: questions are checked, forwarded to the name servers of the host, and answers filtered.
//!
//! A question about a name that the policy does not allow is not forwarded, since a name can carry data out. It is
//! answered with `NXDOMAIN` at once: a refusal would make most clients repeat the question for seconds. Questions about
//! IPv6 addresses are answered with no records, because guests have no IPv6.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use forkd_net_proto::Reason;
use forkd_types::{DomainName, Policy, Rule};
use hickory_proto::op::{Message, MessageType, OpCode, ResponseCode};
use hickory_proto::rr::{RData, RecordType};

use crate::HostAddresses;
use crate::policy;

/// The largest answer over UDP to a client that names no size.
const PLAIN_SIZE: u16 = 512;
/// The largest answer over UDP in all cases: larger ones would be cut into fragments.
const MAX_SIZE: u16 = 1400;
/// Characters of an invalid name that the log shows: as many as the longest valid name has.
const MAX_SHOWN: usize = 253;

/// The next step for a question.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// It is no question.
    Ignore,
    /// This answer is ready. If the policy denied the question, `denied` has the name in it and the reason.
    Answer {
        message: Vec<u8>,
        denied: Option<(String, Reason)>,
    },
    /// This message goes to a name server.
    Forward { message: Vec<u8>, asked: Asked },
}

/// A question that was forwarded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The number in the guest's question.
    id: u16,
    /// The number in ours.
    ours: u16,
    name: DomainName,
    kind: RecordType,
    max_size: u16,
}

/// How a guest asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Udp,
    Tcp,
}

/// Reads a question of a guest.
pub fn question(bytes: &[u8], transport: Transport, floor: &[Rule], policy: &Policy) -> Step {
    let Ok(message) = Message::from_vec(bytes) else {
        return Step::Ignore;
    };
    let meta = message.metadata;
    if meta.message_type != MessageType::Query {
        return Step::Ignore;
    }
    let failed = |code| answer(&message, code, None);
    if meta.op_code != OpCode::Query {
        return failed(ResponseCode::NotImp);
    }
    let [query] = message.queries.as_slice() else {
        return failed(ResponseCode::FormErr);
    };
    let text = query.name().to_ascii();
    let Ok(name) = text.parse::<DomainName>() else {
        let denied = (text.chars().take(MAX_SHOWN).collect(), Reason::Default);
        return answer(&message, ResponseCode::NXDomain, Some(denied));
    };
    if let Err(reason) = policy::may_resolve(floor, policy, &name) {
        let denied = (name.to_string(), reason);
        return answer(&message, ResponseCode::NXDomain, Some(denied));
    }
    if query.query_type() == RecordType::AAAA {
        return failed(ResponseCode::NoError);
    }
    let asked = Asked {
        id: meta.id,
        ours: rand::random(),
        name,
        kind: query.query_type(),
        max_size: match (transport, &message.edns) {
            (Transport::Tcp, _) => u16::MAX,
            (Transport::Udp, None) => PLAIN_SIZE,
            (Transport::Udp, Some(edns)) => edns.max_payload().clamp(PLAIN_SIZE, MAX_SIZE),
        },
    };
    // A message of our own: nothing else of the guest's bytes leaves the host.
    let mut forward = Message::new(asked.ours, MessageType::Query, OpCode::Query);
    forward.metadata.recursion_desired = true;
    forward.add_query(query.clone());
    match forward.to_vec() {
        Ok(message) => Step::Forward { message, asked },
        Err(_) => failed(ResponseCode::FormErr),
    }
}

fn answer(question: &Message, code: ResponseCode, denied: Option<(String, Reason)>) -> Step {
    let mut message = Message::new(question.metadata.id, MessageType::Response, OpCode::Query);
    message.metadata.op_code = question.metadata.op_code;
    message.metadata.recursion_desired = question.metadata.recursion_desired;
    message.metadata.recursion_available = true;
    message.metadata.response_code = code;
    message.queries.clone_from(&question.queries);
    match message.to_vec() {
        Ok(message) => Step::Answer { message, denied },
        Err(_) => Step::Ignore,
    }
}

/// An answer for the guest and the addresses in it.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub message: Vec<u8>,
    pub addresses: Vec<(IpAddr, Duration)>,
}

/// Turns the answer of a name server into one for the guest. `None` if it does not answer this question.
pub fn reply(bytes: &[u8], asked: &Asked, policy: &Policy, host: &HostAddresses) -> Option<Answer> {
    let mut message = Message::from_vec(bytes).ok()?;
    let [query] = message.queries.as_slice() else {
        return None;
    };
    let same = message.metadata.id == asked.ours
        && message.metadata.message_type == MessageType::Response
        && query.query_type() == asked.kind
        && query
            .name()
            .to_ascii()
            .parse()
            .is_ok_and(|name: DomainName| name == asked.name);
    if !same {
        return None;
    }
    let allowed = |data: &RData| match data {
        RData::A(a) => policy::may_answer(policy, host, IpAddr::V4(a.0)),
        RData::AAAA(_) => false,
        _ => true,
    };
    message.answers.retain(|record| allowed(&record.data));
    message.additionals.clear();
    message
        .authorities
        .retain(|record| record.record_type() == RecordType::SOA);
    message.edns = None;
    message.metadata.id = asked.id;
    let addresses = message
        .answers
        .iter()
        .filter_map(|record| match record.data {
            RData::A(a) => Some((IpAddr::V4(a.0), Duration::from_secs(record.ttl.into()))),
            _ => None,
        })
        .collect();
    let mut bytes = message.to_vec().ok()?;
    if bytes.len() > usize::from(asked.max_size) {
        let mut short = message.truncate();
        short.metadata.truncation = true;
        bytes = short.to_vec().ok()?;
    }
    Some(Answer {
        message: bytes,
        addresses,
    })
}

/// The answer if no name server answered.
pub fn failure(asked: &Asked) -> Option<Vec<u8>> {
    let mut message = Message::new(asked.id, MessageType::Response, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.metadata.recursion_available = true;
    message.metadata.response_code = ResponseCode::ServFail;
    let name = hickory_proto::rr::Name::from_ascii(asked.name.as_str()).ok()?;
    message.add_query(hickory_proto::op::Query::query(name, asked.kind));
    message.to_vec().ok()
}

impl Asked {
    pub fn name(&self) -> &DomainName {
        &self.name
    }
}

/// The most addresses that are remembered.
const MAX_PINS: usize = 4096;
/// The most names for one address.
const MAX_NAMES: usize = 32;
/// How long an address is remembered at least: clients keep an answer for longer than its time to live.
const MIN_PIN: Duration = Duration::from_secs(60);
const MAX_PIN: Duration = Duration::from_secs(24 * 3600);

/// Which names the resolver gave an address for.
#[derive(Debug, Default)]
pub struct Pins {
    names: HashMap<IpAddr, Vec<(DomainName, Instant)>>,
}

impl Pins {
    pub fn add(&mut self, address: IpAddr, name: &DomainName, ttl: Duration, now: Instant) {
        if self.names.len() >= MAX_PINS && !self.names.contains_key(&address) {
            self.names
                .retain(|_, names| names.iter().any(|(_, until)| *until > now));
            if self.names.len() >= MAX_PINS {
                return;
            }
        }
        let until = now + ttl.clamp(MIN_PIN, MAX_PIN);
        let names = self.names.entry(address).or_default();
        names.retain(|(own, until)| own != name && *until > now);
        if names.len() == MAX_NAMES {
            names.remove(0);
        }
        names.push((name.clone(), until));
    }

    /// The names of an address that are not too old, newest last.
    pub fn of(&self, address: IpAddr, now: Instant) -> Vec<DomainName> {
        let names = self.names.get(&address).into_iter().flatten();
        names
            .filter(|(_, until)| *until > now)
            .map(|(name, _)| name.clone())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_types::Mode;
    use hickory_proto::op::Query;
    use hickory_proto::rr::{Name, Record, rdata};
    use proptest::prelude::*;

    fn ask(name: &str, kind: RecordType) -> Vec<u8> {
        let mut message = Message::query();
        message.metadata.id = 77;
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        message.to_vec().unwrap()
    }

    fn policy(rules: &[&str]) -> Policy {
        let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        Policy::new(Mode::Custom, rules, Default::default()).unwrap()
    }

    fn code(message: &[u8]) -> ResponseCode {
        let message = Message::from_vec(message).unwrap();
        assert_eq!(message.metadata.id, 77);
        message.metadata.response_code
    }

    #[test]
    fn a_name_without_a_rule_stays_on_the_host() {
        let policy = policy(&["allow a.example:443"]);
        let Step::Answer {
            message,
            denied: Some((_, Reason::Default)),
        } = question(
            &ask("x.evil.example.", RecordType::A),
            Transport::Udp,
            &[],
            &policy,
        )
        else {
            panic!("forwarded");
        };
        assert_eq!(code(&message), ResponseCode::NXDomain);
        let Step::Answer {
            message,
            denied: None,
        } = question(
            &ask("a.example.", RecordType::AAAA),
            Transport::Udp,
            &[],
            &policy,
        )
        else {
            panic!("forwarded");
        };
        assert_eq!(code(&message), ResponseCode::NoError);
        let Step::Forward { message, .. } = question(
            &ask("A.Example.", RecordType::A),
            Transport::Udp,
            &[],
            &policy,
        ) else {
            panic!("not forwarded");
        };
        assert_eq!(Message::from_vec(&message).unwrap().queries.len(), 1);
    }

    #[test]
    fn answers_lose_addresses_that_the_policy_refuses() {
        let policy = policy(&["allow a.example:443"]);
        let Step::Forward { message, asked } = question(
            &ask("a.example.", RecordType::A),
            Transport::Udp,
            &[],
            &policy,
        ) else {
            panic!("not forwarded");
        };
        let mut answer = Message::from_vec(&message).unwrap().into_response();
        let name = Name::from_ascii("a.example.").unwrap();
        for address in ["198.51.100.7", "10.0.0.5", "127.0.0.1", "169.254.169.254"] {
            let data = RData::A(rdata::A(address.parse().unwrap()));
            answer.add_answer(Record::from_rdata(name.clone(), 30, data));
        }
        let bytes = answer.to_vec().unwrap();
        let host = HostAddresses::default();
        let got = reply(&bytes, &asked, &policy, &host).unwrap();
        assert_eq!(
            got.addresses,
            [("198.51.100.7".parse().unwrap(), Duration::from_secs(30))]
        );
        assert_eq!(Message::from_vec(&got.message).unwrap().answers.len(), 1);
        let other = Asked {
            ours: asked.ours.wrapping_add(1),
            ..asked.clone()
        };
        assert_eq!(reply(&bytes, &other, &policy, &host), None);
        assert_eq!(code(&failure(&asked).unwrap()), ResponseCode::ServFail);
    }

    #[test]
    fn pins_end_and_are_bounded() {
        let now = Instant::now();
        let mut pins = Pins::default();
        let name: DomainName = "a.example".parse().unwrap();
        for index in 0..5000u32 {
            pins.add(IpAddr::V4(index.into()), &name, Duration::ZERO, now);
        }
        assert_eq!(pins.names.len(), MAX_PINS);
        let address = IpAddr::V4(1.into());
        assert_eq!(
            pins.of(address, now + Duration::from_secs(59)),
            std::slice::from_ref(&name)
        );
        let later = now + Duration::from_secs(61);
        assert!(pins.of(address, later).is_empty());
        pins.add(IpAddr::V4(9999.into()), &name, Duration::ZERO, later);
        assert_eq!(pins.of(IpAddr::V4(9999.into()), later), [name]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let policy = policy(&["allow a.example:443"]);
            let _ = question(&bytes, Transport::Udp, &[], &policy);
            let Step::Forward { asked, .. } = question(&ask("a.example.", RecordType::A), Transport::Udp, &[], &policy) else {
                panic!("not forwarded");
            };
            let _ = reply(&bytes, &asked, &policy, &HostAddresses::default());
        }
    }
}
