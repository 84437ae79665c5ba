//! The rules of all sandboxes and the values of the secrets that they name.
//!
//! A value is here as long as a rule of some sandbox names it. The controller sends rules before values.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use forkd_net_proto::MAX_IDS;
use forkd_net_proto::broker::{BrokerReply, BrokerRule, Refusal};
use forkd_types::{HostPort, SandboxId, SecretName, SecretValue, TemplatePart};
use zeroize::Zeroizing;

use crate::request::{Injected, Injections};

#[derive(Debug)]
struct Held {
    owner: String,
    rules: Vec<BrokerRule>,
}

/// Rules and values.
#[derive(Debug, Default)]
pub struct Vault {
    sandboxes: BTreeMap<SandboxId, Held>,
    values: HashMap<(String, SecretName), SecretValue>,
}

impl Vault {
    /// Keeps a value, if a rule names it.
    pub fn set_value(&mut self, owner: String, name: SecretName, value: SecretValue) {
        if self.names(&owner, &name) {
            self.values.insert((owner, name), value);
        }
    }

    fn names(&self, owner: &str, name: &SecretName) -> bool {
        is_named(&self.sandboxes, owner, name)
    }

    pub fn remove_value(&mut self, owner: String, name: SecretName) {
        self.values.remove(&(owner, name));
    }

    /// Replaces the rules of a sandbox and forgets values that no rule names any more.
    pub fn set_rules(&mut self, id: SandboxId, owner: String, rules: Vec<BrokerRule>) {
        if rules.is_empty() {
            self.sandboxes.remove(&id);
        } else {
            self.sandboxes.insert(id, Held { owner, rules });
        }
        let sandboxes = &self.sandboxes;
        self.values
            .retain(|(owner, name), _| is_named(sandboxes, owner, name));
    }

    /// Sandboxes with rules, in the order of their IDs.
    pub fn list(&self, after: Option<&SandboxId>) -> BrokerReply {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut ids = self
            .sandboxes
            .range::<SandboxId, _>((start, Bound::Unbounded));
        let listed = ids
            .by_ref()
            .take(MAX_IDS)
            .map(|(id, _)| id.clone())
            .collect();
        BrokerReply::List {
            ids: listed,
            more: ids.next().is_some(),
        }
    }

    /// A rule of the sandbox is about this host.
    pub fn serves(&self, id: &SandboxId, to: &HostPort) -> bool {
        let held = self.sandboxes.get(id);
        held.is_some_and(|held| held.rules.iter().any(|rule| rule.rule.to == *to))
    }

    /// The secrets for the next request of a sandbox to a host. Never a part of them.
    pub fn injections(&self, id: &SandboxId, to: &HostPort) -> Result<Injections, Refusal> {
        let held = self.sandboxes.get(id).ok_or(Refusal::NoRule)?;
        let rules = held.rules.iter().filter(|rule| rule.rule.to == *to);
        let headers = rules
            .map(|rule| {
                Ok(Injected {
                    header: rule.rule.header.clone(),
                    value: self.filled(&held.owner, rule)?,
                    placeholder: rule.placeholder.clone(),
                })
            })
            .collect::<Result<Vec<_>, Refusal>>()?;
        if headers.is_empty() {
            return Err(Refusal::NoRule);
        }
        let placeholders = held
            .rules
            .iter()
            .filter_map(|rule| rule.placeholder.clone());
        Ok(Injections {
            headers,
            placeholders: placeholders.collect(),
        })
    }

    fn filled(&self, owner: &str, rule: &BrokerRule) -> Result<Zeroizing<String>, Refusal> {
        let mut text = Zeroizing::new(String::new());
        for part in rule.rule.value.parts() {
            match part {
                TemplatePart::Text(part) => text.push_str(part),
                TemplatePart::Secret(name) => {
                    let key = (owner.to_owned(), name.clone());
                    let value = self.values.get(&key).ok_or(Refusal::NoSecret)?;
                    text.push_str(value.expose());
                }
            }
        }
        Ok(text)
    }
}

fn is_named(sandboxes: &BTreeMap<SandboxId, Held>, owner: &str, name: &SecretName) -> bool {
    let own = sandboxes.values().filter(|held| held.owner == owner);
    let mut rules = own.flat_map(|held| &held.rules);
    rules.any(|rule| rule.rule.value.secrets().any(|other| other == name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_types::InjectRule;

    fn rule(to: &str, value: &str) -> BrokerRule {
        let rule = InjectRule::new(
            to.parse().unwrap(),
            "authorization".parse().unwrap(),
            value.parse().unwrap(),
            None,
        );
        BrokerRule {
            rule: rule.unwrap(),
            placeholder: None,
        }
    }

    fn value(text: &str) -> SecretValue {
        SecretValue::new(text.to_owned()).unwrap()
    }

    fn header(vault: &Vault, id: &str, to: &str) -> Result<String, Refusal> {
        let found = vault.injections(&id.parse().unwrap(), &to.parse().unwrap())?;
        Ok(found.headers[0].value.to_string())
    }

    #[test]
    fn a_secret_belongs_to_its_owner_its_sandbox_and_its_host() {
        let mut vault = Vault::default();
        let name: SecretName = "key".parse().unwrap();
        let rules = || vec![rule("api.example", "Bearer ${secret:key}")];
        vault.set_rules("sb-1".parse().unwrap(), "ann".into(), rules());
        vault.set_rules("sb-2".parse().unwrap(), "bob".into(), rules());
        vault.set_value("ann".into(), name.clone(), value("a-1"));
        vault.set_value("bob".into(), name.clone(), value("b-1"));
        assert_eq!(header(&vault, "sb-1", "api.example").unwrap(), "Bearer a-1");
        assert_eq!(header(&vault, "sb-2", "api.example").unwrap(), "Bearer b-1");
        assert_eq!(
            header(&vault, "sb-1", "other.example"),
            Err(Refusal::NoRule)
        );
        assert_eq!(
            header(&vault, "sb-1", "api.example:8443"),
            Err(Refusal::NoRule)
        );
        assert_eq!(header(&vault, "sb-3", "api.example"), Err(Refusal::NoRule));
        // Rotation holds for the next request; without the value there is none.
        vault.set_value("ann".into(), name.clone(), value("a-2"));
        assert_eq!(header(&vault, "sb-1", "api.example").unwrap(), "Bearer a-2");
        vault.remove_value("ann".into(), name);
        assert_eq!(
            header(&vault, "sb-1", "api.example"),
            Err(Refusal::NoSecret)
        );
    }

    #[test]
    fn a_value_that_no_rule_names_is_forgotten() {
        let mut vault = Vault::default();
        let name: SecretName = "key".parse().unwrap();
        vault.set_value("ann".into(), name.clone(), value("a-1"));
        assert!(vault.values.is_empty());
        let rules = vec![rule("api.example", "${secret:key}")];
        vault.set_rules("sb-1".parse().unwrap(), "ann".into(), rules.clone());
        vault.set_value("ann".into(), name, value("a-1"));
        assert_eq!(vault.values.len(), 1);
        // Another owner's rule about a secret of the same name does not keep it.
        vault.set_rules("sb-2".parse().unwrap(), "bob".into(), rules);
        vault.set_rules("sb-1".parse().unwrap(), "ann".into(), Vec::new());
        assert!(vault.values.is_empty());
        assert_eq!(
            header(&vault, "sb-2", "api.example"),
            Err(Refusal::NoSecret)
        );
    }
}
