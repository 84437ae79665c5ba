//! The stored network policy of a sandbox.

use forkd_types::{InjectRule, Mode, NetLimits, Policy, SecretName};
use serde::{Deserialize, Serialize};

/// A network policy in the state database. Rules are text, in the form that requests have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkRecord {
    /// The name of the mode.
    pub mode: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsRecord>,
    /// Grows with every change, so that the engine's policy can be compared with this one.
    #[serde(default)]
    pub generation: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inject: Vec<InjectRecord>,
}

/// A header that gets a secret. Only names of secrets are stored here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InjectRecord {
    pub host: String,
    pub header: String,
    /// With `${secret:NAME}` for each secret.
    pub value: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<String>,
    /// The text that stands for the secret in the variable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placeholder: Option<String>,
}

impl InjectRecord {
    fn of(rule: &InjectRule) -> Self {
        Self {
            host: rule.to.to_string(),
            header: rule.header.to_string(),
            value: rule.value.to_string(),
            env: rule.variable.as_ref().map(ToString::to_string),
            placeholder: None,
        }
    }

    /// The rule; an error in words if it cannot be read.
    pub fn rule(&self) -> Result<InjectRule, String> {
        let text = |error: forkd_types::InvalidInject| forkd_types::chain(&error);
        let env = self.env.as_ref().map(|name| name.parse()).transpose();
        InjectRule::new(
            self.host.parse().map_err(text)?,
            self.header.parse().map_err(text)?,
            self.value.parse().map_err(text)?,
            env.map_err(text)?,
        )
        .map_err(text)
    }
}

/// Limits that differ from the defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsRecord {
    pub connections: u32,
    pub new_per_second: u32,
    pub dns_per_second: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_mbit: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress_mbit: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress_mib_total: Option<u32>,
}

impl Default for NetworkRecord {
    /// The network of a sandbox of a daemon that knew no networks.
    fn default() -> Self {
        Self::first(&Policy::none())
    }
}

impl NetworkRecord {
    /// The policy with which a sandbox starts.
    pub fn first(policy: &Policy) -> Self {
        Self::numbered(policy, 1)
    }

    /// The record after a change.
    pub fn next(&self, policy: &Policy) -> Self {
        Self::numbered(policy, self.generation.saturating_add(1))
    }

    fn numbered(policy: &Policy, generation: u64) -> Self {
        let limits = *policy.limits();
        Self {
            mode: policy.mode().to_string(),
            rules: policy.rules().iter().map(ToString::to_string).collect(),
            limits: (limits != NetLimits::default()).then_some(LimitsRecord {
                connections: limits.connections,
                new_per_second: limits.new_per_second,
                dns_per_second: limits.dns_per_second,
                egress_mbit: limits.egress_mbit,
                ingress_mbit: limits.ingress_mbit,
                egress_mib_total: limits.egress_mib_total,
            }),
            generation,
            inject: policy.inject().iter().map(InjectRecord::of).collect(),
        }
    }

    /// Gives every injection with a variable its placeholder.
    pub fn place<E>(
        &mut self,
        mut placeholder: impl FnMut(&SecretName) -> Result<String, E>,
    ) -> Result<(), E> {
        for inject in &mut self.inject {
            let Ok(rule) = inject.rule() else { continue };
            if let (Some(_), Some(name)) = (&rule.variable, rule.value.only_secret()) {
                inject.placeholder = Some(placeholder(name)?);
            }
        }
        Ok(())
    }

    /// The policy. A record that cannot be read allows nothing.
    pub fn policy(&self) -> Policy {
        self.read().unwrap_or_else(|problem| {
            tracing::error!(
                problem,
                "a stored network policy is invalid and allows nothing"
            );
            Policy::none()
        })
    }

    fn read(&self) -> Result<Policy, String> {
        let mode: Mode = self.mode.parse().map_err(|error| format!("{error}"))?;
        let rules = self.rules.iter().map(|rule| rule.parse());
        let rules = rules
            .collect::<Result<Vec<_>, forkd_types::InvalidRule>>()
            .map_err(|error| forkd_types::chain(&error))?;
        let limits = self
            .limits
            .map_or_else(NetLimits::default, |limits| NetLimits {
                connections: limits.connections,
                new_per_second: limits.new_per_second,
                dns_per_second: limits.dns_per_second,
                egress_mbit: limits.egress_mbit,
                ingress_mbit: limits.ingress_mbit,
                egress_mib_total: limits.egress_mib_total,
            });
        let inject = self.inject.iter().map(InjectRecord::rule);
        let inject = inject.collect::<Result<Vec<_>, String>>()?;
        Policy::new(mode, rules, limits)
            .and_then(|policy| policy.with_inject(inject))
            .map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_stored_and_read_back() {
        let rules = vec!["allow *.a.example:443".parse().unwrap()];
        let limits = NetLimits {
            connections: 3,
            ingress_mbit: Some(20),
            egress_mib_total: Some(7),
            ..NetLimits::default()
        };
        let inject = InjectRule::new(
            "api.example:8443".parse().unwrap(),
            "x-api-key".parse().unwrap(),
            "${secret:key}".parse().unwrap(),
            Some("API_KEY".parse().unwrap()),
        );
        let policy = Policy::new(Mode::Custom, rules, limits).unwrap();
        let policy = policy.with_inject(vec![inject.unwrap()]).unwrap();
        let first = NetworkRecord::first(&policy);
        let text = serde_json::to_string(&first).unwrap();
        let back: NetworkRecord = serde_json::from_str(&text).unwrap();
        assert_eq!(back.policy(), policy);
        assert_eq!(back.next(&policy).generation, 2);
    }

    #[test]
    fn a_record_that_cannot_be_read_allows_nothing() {
        for text in [
            r#"{"mode": "later"}"#,
            r#"{"mode": "custom", "rules": ["allow"]}"#,
            r#"{"mode": "none", "rules": ["allow *"]}"#,
            r#"{"mode": "public", "inject": [{"host": "a.example", "header": "host", "value": "${secret:a}"}]}"#,
        ] {
            let record: NetworkRecord = serde_json::from_str(text).unwrap();
            assert_eq!(record.policy(), Policy::none(), "{text}");
        }
    }
}
