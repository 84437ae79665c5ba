//! The network of a sandbox *(extension)*.
//!
//! [`NetworkRequest`] is the wire type of a policy: a mode as a string, or an object with rules and limits.
//! [`NetworkRequest::checked`] turns it into a [`Policy`]. [`NetworkInfo`], [`FlowInfo`] and [`FlowEntry`] describe the
//! network of a running sandbox. [`E2bNetwork`] maps the network fields of E2B clients to a policy.

mod e2b;

use forkd_types::{
    InjectRule, InvalidInject, InvalidMode, InvalidPolicy, InvalidRule, NetLimits, Policy, Rule,
};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use crate::Isolation;
pub use e2b::{E2bNetwork, InvalidE2bNetwork};

/// A network policy: a mode such as `"public"`, or an object with a mode, rules and limits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum NetworkRequest {
    /// `none`, `public`, `open` or `custom`.
    Mode(String),
    /// Mode, rules and limits.
    Policy(NetworkPolicy),
}

/// The destinations that the guest of a sandbox may reach.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkPolicy {
    /// Verdict on connections that no rule matches: `none` and `custom` deny, `public` allows public addresses, `open`
    /// allows public and private addresses. `none` takes no rules.
    #[schema(pattern = "^(none|public|open|custom)$")]
    pub mode: String,
    /// Rules such as `allow *.packages.example:443` or `deny public:25`; the first that matches decides.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 200)]
    pub rules: Vec<String>,
    /// Limits; a missing one has its default.
    #[serde(default, skip_serializing_if = "NetworkLimits::is_empty")]
    pub limits: NetworkLimits,
    /// Headers that get a secret on their way to a host. The host itself needs a rule or a mode that allows it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 16)]
    pub inject: Vec<Inject>,
}

/// One header of requests to one host gets a secret. The guest never has the value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Inject {
    /// A host by its name, with a port if it is not 443.
    #[schema(max_length = 260)]
    pub host: String,
    /// The header that the secret replaces.
    #[schema(max_length = 64)]
    pub header: String,
    /// The value of the header, with `${secret:NAME}` for each secret.
    #[schema(max_length = 512)]
    pub value: String,
    /// An environment variable of the guest that gets a placeholder. Only the placeholder is replaced then, inside the
    /// header, and `value` is `${secret:NAME}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 64)]
    pub env: Option<String>,
}

/// Limits on the network of one sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkLimits {
    /// TCP connections open at one time; 1024 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 4096)]
    pub connections: Option<u32>,
    /// New TCP connections and UDP flows per second; 200 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub new_per_second: Option<u32>,
    /// DNS questions per second; 100 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub dns_per_second: Option<u32>,
    /// Megabits of payload per second from the guest; 0, the default, is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_mbit: Option<u32>,
    /// Megabits of payload per second to the guest; 0, the default, is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress_mbit: Option<u32>,
    /// Mebibytes of payload that the guest may send since its network engine was started; 0, the default, is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_mib_total: Option<u32>,
}

/// Body of `PATCH /v1/sandboxes/{id}/network`: changes to the policy in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpdateNetwork {
    /// New mode; the mode in force by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Rules to put before all others. A rule that the policy has already moves to the front.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 200)]
    pub add: Vec<String>,
    /// Rules to remove. A rule that the policy does not have is no error.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 200)]
    pub remove: Vec<String>,
    /// New limits; a missing one stays as it is.
    #[serde(default, skip_serializing_if = "NetworkLimits::is_empty")]
    pub limits: NetworkLimits,
    /// Injections in place of all those in force; a missing list leaves them as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_items = 16)]
    pub inject: Option<Vec<Inject>>,
}

/// Why a network policy is rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidNetwork {
    /// The mode is unknown.
    #[error(transparent)]
    Mode(#[from] InvalidMode),
    /// A rule cannot be read.
    #[error("rule {number} of the network policy is invalid")]
    Rule {
        /// The position in the list, from 1.
        number: usize,
        #[source]
        source: InvalidRule,
    },
    /// An injection cannot be read.
    #[error("injection {number} of the network policy is invalid")]
    Inject {
        /// The position in the list, from 1.
        number: usize,
        #[source]
        source: InvalidInject,
    },
    /// The parts do not fit together.
    #[error(transparent)]
    Policy(#[from] InvalidPolicy),
}

fn rules(texts: &[String]) -> Result<Vec<Rule>, InvalidNetwork> {
    // Before the rules are parsed: the number of rules is the client's choice.
    if texts.len() > forkd_types::MAX_RULES {
        return Err(InvalidPolicy::TooManyRules { count: texts.len() }.into());
    }
    let parsed = texts.iter().zip(1..).map(|(text, number)| {
        text.parse()
            .map_err(|source| InvalidNetwork::Rule { number, source })
    });
    parsed.collect()
}

fn injections(given: &[Inject]) -> Result<Vec<InjectRule>, InvalidNetwork> {
    if given.len() > forkd_types::MAX_INJECTIONS {
        let count = given.len();
        return Err(InvalidPolicy::from(InvalidInject::TooMany { count }).into());
    }
    let parsed = given.iter().zip(1..).map(|(inject, number)| {
        let invalid = |source| InvalidNetwork::Inject { number, source };
        inject.checked().map_err(invalid)
    });
    parsed.collect()
}

impl Inject {
    /// The rule, if every part is valid.
    pub fn checked(&self) -> Result<InjectRule, InvalidInject> {
        let variable = self.env.as_ref().map(|name| name.parse()).transpose()?;
        InjectRule::new(
            self.host.parse()?,
            self.header.parse()?,
            self.value.parse()?,
            variable,
        )
    }
}

impl From<&InjectRule> for Inject {
    fn from(rule: &InjectRule) -> Self {
        Self {
            host: rule.to.to_string(),
            header: rule.header.to_string(),
            value: rule.value.to_string(),
            env: rule.variable.as_ref().map(ToString::to_string),
        }
    }
}

impl NetworkRequest {
    /// The policy, if every part is valid.
    pub fn checked(&self) -> Result<Policy, InvalidNetwork> {
        match self {
            Self::Mode(mode) => Ok(Policy::new(
                mode.parse()?,
                Vec::new(),
                NetLimits::default(),
            )?),
            Self::Policy(policy) => policy.checked(),
        }
    }
}

impl NetworkPolicy {
    /// The policy, if every part is valid.
    pub fn checked(&self) -> Result<Policy, InvalidNetwork> {
        let mode = self.mode.parse()?;
        let policy = Policy::new(mode, rules(&self.rules)?, self.limits.filled())?;
        Ok(policy.with_inject(injections(&self.inject)?)?)
    }
}

impl From<&Policy> for NetworkPolicy {
    fn from(policy: &Policy) -> Self {
        Self {
            mode: policy.mode().to_string(),
            rules: policy.rules().iter().map(ToString::to_string).collect(),
            limits: NetworkLimits::of(policy.limits()),
            inject: policy.inject().iter().map(Inject::from).collect(),
        }
    }
}

impl NetworkLimits {
    /// Whether no limit is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn filled(self) -> NetLimits {
        self.over(NetLimits::default())
    }

    /// The limits `below`, with those that are given here in their place.
    fn over(self, below: NetLimits) -> NetLimits {
        // Zero lifts a limit.
        let lifted = |given: Option<u32>, own: Option<u32>| match given {
            Some(value) => Some(value).filter(|value| *value > 0),
            None => own,
        };
        NetLimits {
            connections: self.connections.unwrap_or(below.connections),
            new_per_second: self.new_per_second.unwrap_or(below.new_per_second),
            dns_per_second: self.dns_per_second.unwrap_or(below.dns_per_second),
            egress_mbit: lifted(self.egress_mbit, below.egress_mbit),
            ingress_mbit: lifted(self.ingress_mbit, below.ingress_mbit),
            egress_mib_total: lifted(self.egress_mib_total, below.egress_mib_total),
        }
    }

    /// The limits that differ from their defaults.
    fn of(limits: &NetLimits) -> Self {
        let default = NetLimits::default();
        let changed = |value: u32, usual: u32| (value != usual).then_some(value);
        Self {
            connections: changed(limits.connections, default.connections),
            new_per_second: changed(limits.new_per_second, default.new_per_second),
            dns_per_second: changed(limits.dns_per_second, default.dns_per_second),
            egress_mbit: limits.egress_mbit,
            ingress_mbit: limits.ingress_mbit,
            egress_mib_total: limits.egress_mib_total,
        }
    }
}

impl UpdateNetwork {
    /// The policy after the changes.
    pub fn applied(&self, to: &Policy) -> Result<Policy, InvalidNetwork> {
        let mode = match &self.mode {
            Some(mode) => mode.parse()?,
            None => to.mode(),
        };
        let mut all = rules(&self.add)?;
        let removed = rules(&self.remove)?;
        for rule in to.rules() {
            if !removed.contains(rule) && !all.contains(rule) {
                all.push(rule.clone());
            }
        }
        let inject = match &self.inject {
            Some(given) => injections(given)?,
            None => to.inject().to_vec(),
        };
        let policy = Policy::new(mode, all, self.limits.over(*to.limits()))?;
        Ok(policy.with_inject(inject)?)
    }
}

impl<'de> Deserialize<'de> for NetworkRequest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RequestVisitor)
    }
}

/// Reads a mode or an object. A derived reader would not say which field of the object is wrong.
struct RequestVisitor;

impl<'de> Visitor<'de> for RequestVisitor {
    type Value = NetworkRequest;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a network mode or an object with a mode, rules and limits")
    }

    fn visit_str<E: serde::de::Error>(self, mode: &str) -> Result<Self::Value, E> {
        Ok(NetworkRequest::Mode(mode.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        NetworkPolicy::deserialize(MapAccessDeserializer::new(map)).map(NetworkRequest::Policy)
    }
}

/// Response to `GET /v1/sandboxes/{id}/network`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkInfo {
    /// Policy of the sandbox.
    pub policy: NetworkPolicy,
    /// Number of the policy; it grows with every change.
    pub generation: u64,
    /// Whether the network engine serves the sandbox. If not, no packet leaves the guest.
    pub attached: bool,
    /// Rules of the operator that no policy can override.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub floor: Vec<String>,
    /// Number of open TCP and UDP flows.
    pub open_flows: u32,
    /// Counters since the sandbox was last attached.
    pub counters: NetworkCounters,
}

/// Counters of the network of a sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkCounters {
    /// Bytes of payload from the guest.
    pub bytes_up: u64,
    /// Bytes of payload to the guest.
    pub bytes_down: u64,
    /// Flows that were allowed.
    pub flows: u64,
    /// Flows that the policy or a limit denied.
    pub denied: u64,
    /// DNS questions of the guest.
    pub dns: u64,
    /// DNS questions that the policy or a limit denied.
    pub dns_denied: u64,
    /// Segments of unknown connections, answered with a reset.
    pub resets: u64,
    /// Frames that could not be used.
    pub frames_dropped: u64,
    /// Waits of connections and lost datagrams, because of a limit on the rate.
    #[serde(default)]
    pub limited: u64,
}

/// An open flow: an entry of `GET /v1/sandboxes/{id}/network/flows`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlowInfo {
    /// `tcp` or `udp`.
    pub protocol: String,
    /// Address of the destination.
    pub address: String,
    /// Port of the destination.
    pub port: u16,
    /// Name by which the guest found the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Bytes from the guest.
    pub up: u64,
    /// Bytes to the guest.
    pub down: u64,
    /// Age of the flow, in milliseconds.
    pub age_ms: u64,
}

/// A flow that ended or was denied: a line of `GET /v1/sandboxes/{id}/network/log`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlowEntry {
    /// Number of the entry since the sandbox was attached, from 1.
    pub number: u64,
    /// Time in milliseconds since 1970.
    pub at_unix_ms: u64,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// Address of the destination.
    pub address: String,
    /// Port of the destination.
    pub port: u16,
    /// Name by which the guest found the address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// `allowed` or `denied`.
    pub verdict: String,
    /// The reason of the verdict, such as `the mode public` or `the group private`.
    pub reason: String,
    /// The rule that decided, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Bytes from the guest.
    pub up: u64,
    /// Bytes to the guest.
    pub down: u64,
    /// Duration of the flow, in milliseconds.
    pub duration_ms: u64,
    /// Entries lost before this one, because the log was full.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The network engine of the host, in the response to `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkStatus {
    /// `running`; `missing` if the program is not installed; `down` if it does not answer.
    pub engine: String,
    /// Name servers that questions of guests are forwarded to.
    #[serde(default)]
    pub resolvers: Vec<String>,
    /// Policy of sandboxes whose request names none.
    pub default: NetworkPolicy,
    /// Rules of the operator that no policy can override.
    #[serde(default)]
    pub floor: Vec<String>,
    /// Sandboxes that the engine serves.
    #[serde(default)]
    pub sandboxes: u32,
    /// Walls between the engine and the host; absent if the engine does not run. The walls are `capabilities`,
    /// `seccomp`, `user` and `landlock`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub isolation: Option<Isolation>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_types::Mode;

    fn request(json: &str) -> Result<NetworkRequest, serde_json::Error> {
        serde_json::from_str(json)
    }

    #[test]
    fn a_mode_and_an_object_are_read() {
        let public = request(r#""public""#).unwrap().checked().unwrap();
        assert_eq!(public.mode(), Mode::Public);
        let object = request(
            r#"{"mode": "custom", "rules": ["allow *.a.example:443"], "limits": {"connections": 7}}"#,
        );
        let policy = object.unwrap().checked().unwrap();
        assert_eq!(policy.rules().len(), 1);
        assert_eq!(policy.limits().connections, 7);
        let shown = NetworkPolicy::from(&policy);
        assert_eq!(shown.limits.connections, Some(7));
        assert_eq!(shown.limits.dns_per_second, None);
        assert_eq!(shown.checked().unwrap(), policy);
    }

    #[test]
    fn mistakes_name_the_field_or_the_rule() {
        let error = request(r#"{"mode": "custom", "rules": 5}"#).unwrap_err();
        assert!(error.to_string().contains("sequence"), "{error}");
        assert!(request("7").is_err());
        let bad = request(r#"{"mode": "custom", "rules": ["allow *", "permit x"]}"#).unwrap();
        let error = bad.checked().unwrap_err();
        assert!(error.to_string().starts_with("rule 2"), "{error}");
        for json in [r#""offline""#, r#"{"mode": "none", "rules": ["allow *"]}"#] {
            assert!(request(json).unwrap().checked().is_err(), "{json}");
        }
        let many = NetworkPolicy {
            mode: "custom".into(),
            rules: vec!["x".into(); 201],
            ..Default::default()
        };
        assert!(matches!(
            many.checked(),
            Err(InvalidNetwork::Policy(InvalidPolicy::TooManyRules { .. }))
        ));
    }

    #[test]
    fn a_change_puts_new_rules_first_and_removes_others() {
        let policy = NetworkPolicy {
            mode: "custom".into(),
            rules: vec!["allow a.example".into(), "allow b.example".into()],
            limits: NetworkLimits {
                connections: Some(7),
                egress_mbit: Some(5),
                egress_mib_total: Some(3),
                ..NetworkLimits::default()
            },
            ..NetworkPolicy::default()
        };
        let change = UpdateNetwork {
            mode: Some("public".into()),
            add: vec!["deny c.example".into(), "allow b.example".into()],
            remove: vec!["allow a.example".into(), "allow z.example".into()],
            limits: NetworkLimits {
                egress_mbit: Some(0),
                ingress_mbit: Some(9),
                ..NetworkLimits::default()
            },
            ..UpdateNetwork::default()
        };
        let changed = change.applied(&policy.checked().unwrap()).unwrap();
        // Zero lifts a limit, and a limit that is not named stays.
        let limits = changed.limits();
        assert_eq!((limits.egress_mbit, limits.ingress_mbit), (None, Some(9)));
        assert_eq!((limits.connections, limits.egress_mib_total), (7, Some(3)));
        assert_eq!(changed.mode(), Mode::Public);
        let texts: Vec<_> = changed.rules().iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["deny c.example", "allow b.example"]);
    }
}
