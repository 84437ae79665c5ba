//! The preparation of a parent: commands, services, warm-up and settling, and the check of its children.
//!
//! A recipe declares a [`Preparation`], `image.json` carries it, and the daemon carries it out in this order:
//!
//! ```text
//!   run ─► services, each until it is ready ─► warm-up ─► settle ─► cut ─► children ─► check
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::image::Warmup;

/// Everything between the boot of a parent and its cut, and the check of a child.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Preparation {
    /// Commands that run one after another before the services start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub run: Vec<Command>,
    /// Services of the guest. The agent supervises them, in the parent and in every child.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<Service>,
    /// Steps that run one after another when all services are ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warmup: Vec<WarmupStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settle: Option<Settle>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
}

impl Preparation {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A command in the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Command {
    /// The program and its arguments.
    pub exec: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default = "default_timeout")]
    pub timeout_secs: u32,
}

fn default_timeout() -> u32 {
    120
}

/// A service of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    pub name: String,
    /// The program and its arguments. The program stays in the foreground.
    pub exec: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default)]
    pub restart: Restart,
    /// Conditions that hold when the service is ready. All of them have to hold.
    #[serde(default)]
    pub ready: Vec<Ready>,
    /// The time that the service has to become ready.
    #[serde(default = "default_timeout")]
    pub timeout_secs: u32,
}

/// When the agent starts a service again that has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restart {
    Never,
    /// If it ended with a signal or with an exit code other than 0.
    #[default]
    OnFailure,
    Always,
}

/// A condition of readiness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ready {
    /// A TCP port of the loopback address accepts a connection.
    Port(u16),
    /// A file exists. Its path is absolute.
    File(String),
    /// A command ends with exit code 0.
    Exec(Vec<String>),
    /// A line of the output of the service contains this text.
    Log(String),
}

/// A step of the warm-up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WarmupStep {
    /// Starts an interpreter, which stays.
    Interpreter(Warmup),
    /// Runs a command to its end.
    Exec(Command),
}

/// When a parent counts as calm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settle {
    /// The largest share of processor time that a calm parent uses, in percent of all vCPUs.
    pub busy_percent: u8,
    /// How long the parent has to be calm, in milliseconds.
    pub for_ms: u32,
    /// How long to wait. A parent that is not calm by then is cut all the same, and the daemon logs it.
    pub timeout_secs: u32,
}

impl Default for Settle {
    fn default() -> Self {
        Self {
            busy_percent: 5,
            for_ms: 200,
            timeout_secs: 10,
        }
    }
}

/// A command that shows that a child works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    pub exec: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The standard output that the command has to print.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout: Option<String>,
    #[serde(default = "default_timeout")]
    pub timeout_secs: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preparation_survives_its_text() {
        let preparation = Preparation {
            services: vec![Service {
                name: "db".into(),
                exec: vec!["db".into()],
                user: Some("db".into()),
                cwd: None,
                env: BTreeMap::new(),
                restart: Restart::Always,
                ready: vec![Ready::Port(5432), Ready::Log("ready".into())],
                timeout_secs: 60,
            }],
            settle: Some(Settle::default()),
            ..Preparation::default()
        };
        let text = serde_json::to_string(&preparation).unwrap();
        assert!(
            text.contains(r#""ready":[{"port":5432},{"log":"ready"}]"#),
            "{text}"
        );
        assert_eq!(
            serde_json::from_str::<Preparation>(&text).unwrap(),
            preparation
        );
        assert!(Preparation::default().is_empty() && !preparation.is_empty());
    }
}
