//! The network fields of the E2B API as a policy.
//!
//! E2B clients send `allow_internet_access` beside an object `network`. There `allowOut` wins over `denyOut`, and traffic
//! that neither names is allowed. forkd keeps this order with two differences: private addresses, addresses of the host
//! and metadata services stay closed unless an entry names them, and names that no entry allows are not resolved.

use forkd_types::{Cidr, Mode, NetLimits, Policy, Rule, Target};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{InvalidNetwork, rules};

/// The range by which E2B clients name all traffic.
const ALL: Cidr = Cidr::v4([0, 0, 0, 0], 0);

/// The fields about the network in a request of an E2B client.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct E2bNetwork {
    /// A field of the request itself, not of its object `network`.
    #[serde(rename = "allow_internet_access")]
    pub allow_internet_access: Option<bool>,
    /// Addresses, ranges and names that are allowed.
    pub allow_out: Vec<String>,
    /// Addresses and ranges that are denied.
    pub deny_out: Vec<String>,
    /// Whether published ports need no token. Ports do not pass through the policy.
    pub allow_public_traffic: Option<bool>,
}

/// Why the network fields of an E2B client are rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidE2bNetwork {
    /// An entry cannot be read, or there are too many.
    #[error(transparent)]
    Policy(#[from] InvalidNetwork),
    /// A name among the denied entries.
    #[error("denyOut takes addresses and ranges, and {text:?} is a name")]
    DeniedName { text: String },
    /// A name is allowed and everything else is, too.
    #[error(
        "allowOut names a domain, so denyOut must contain 0.0.0.0/0: all other traffic is allowed otherwise"
    )]
    NameWithoutDenial,
}

impl E2bNetwork {
    /// Whether published ports need no token; yes by default.
    pub fn is_public(&self) -> bool {
        self.allow_public_traffic.unwrap_or(true)
    }

    /// The policy that these fields ask for.
    pub fn policy(&self) -> Result<Policy, InvalidE2bNetwork> {
        let allowed = parsed("allow", &self.allow_out)?;
        let mut denied = parsed("deny", &self.deny_out)?;
        for (rule, text) in denied.iter().zip(&self.deny_out) {
            if rule.name().is_some() {
                let text = text.clone();
                return Err(InvalidE2bNetwork::DeniedName { text });
            }
        }
        let everything = |rule: &Rule| rule.target == Target::Range(ALL);
        let closed = self.allow_internet_access == Some(false) || denied.iter().any(everything);
        denied.retain(|rule| !everything(rule));
        if !closed && allowed.iter().any(|rule| rule.name().is_some()) {
            return Err(InvalidE2bNetwork::NameWithoutDenial);
        }
        let mut all = allowed;
        all.extend(denied);
        let mode = match (closed, all.is_empty()) {
            (false, _) => Mode::Public,
            (true, true) => Mode::None,
            (true, false) => Mode::Custom,
        };
        let policy = Policy::new(mode, all, NetLimits::default());
        Ok(policy.map_err(InvalidNetwork::from)?)
    }
}

fn parsed(action: &str, entries: &[String]) -> Result<Vec<Rule>, InvalidNetwork> {
    let texts: Vec<String> = entries
        .iter()
        .map(|entry| format!("{action} {entry}"))
        .collect();
    rules(&texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(json: &str) -> Result<Policy, InvalidE2bNetwork> {
        serde_json::from_str::<E2bNetwork>(json).unwrap().policy()
    }

    fn shown(json: &str) -> (Mode, Vec<String>) {
        let policy = policy(json).unwrap();
        let rules = policy.rules().iter().map(ToString::to_string).collect();
        (policy.mode(), rules)
    }

    #[test]
    fn fields_of_e2b_become_a_policy() {
        let rules = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown("{}"), (Mode::Public, rules(&[])));
        assert_eq!(
            shown(r#"{"allow_internet_access": false}"#),
            (Mode::None, rules(&[]))
        );
        assert_eq!(
            shown(r#"{"allow_internet_access": false, "allowOut": ["203.0.113.0/24"]}"#),
            (Mode::Custom, rules(&["allow 203.0.113.0/24"]))
        );
        let names =
            r#"{"allowOut": ["*.packages.example", "198.51.100.7"], "denyOut": ["0.0.0.0/0"]}"#;
        let wanted = rules(&["allow *.packages.example", "allow 198.51.100.7"]);
        assert_eq!(shown(names), (Mode::Custom, wanted));
        assert_eq!(
            shown(r#"{"denyOut": ["203.0.113.0/24"], "allowOut": ["203.0.113.9"]}"#),
            (
                Mode::Public,
                rules(&["allow 203.0.113.9", "deny 203.0.113.0/24"])
            )
        );
    }

    #[test]
    fn contradictions_are_refused() {
        for json in [
            r#"{"allowOut": ["a.example"]}"#,
            r#"{"denyOut": ["a.example", "0.0.0.0/0"]}"#,
            r#"{"allowOut": ["not a name"]}"#,
            r#"{"allowOut": ["10.0.0.1/8"]}"#,
        ] {
            assert!(policy(json).is_err(), "{json}");
        }
        assert!(E2bNetwork::default().is_public());
    }
}
