//! The choices of an operator: which tools a client sees, and limits on the sandboxes it makes.

use std::str::FromStr;

use thiserror::Error;

use crate::tool::{Set, Spec};
use crate::tools;

/// Lifetime of a sandbox that a tool makes, in seconds, unless the call names another one.
const DEFAULT_TTL: u64 = 1800;
/// Live sandboxes that the tools of one owner may have made, by default.
const DEFAULT_SANDBOXES: usize = 32;

/// Which tools a client sees, and limits on the sandboxes that they make.
#[derive(Debug, Clone)]
pub struct Options {
    /// The tools that a client sees.
    pub tools: Selection,
    /// Leave out every tool that changes something.
    pub read_only: bool,
    /// Live sandboxes that the tools may have made.
    pub max_sandboxes: usize,
    /// Lifetime of a sandbox in seconds, unless the call names another one.
    pub ttl_secs: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            tools: Selection::Set(Set::Core),
            read_only: false,
            max_sandboxes: DEFAULT_SANDBOXES,
            ttl_secs: DEFAULT_TTL,
        }
    }
}

impl Options {
    /// Whether a client sees a tool.
    pub(crate) fn offers(&self, tool: &Spec) -> bool {
        let chosen = match &self.tools {
            Selection::Set(set) => tool.set <= *set,
            Selection::Names(names) => names.iter().any(|name| name == tool.name),
        };
        chosen && (tool.effect.is_read() || !self.read_only)
    }
}

/// The tools that a client sees: a set, or a list of names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selection {
    /// A set with the sets below it.
    Set(Set),
    /// Some tools, by their names.
    Names(Vec<String>),
}

/// Why a selection of tools is rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is neither compat, core, all nor a list of tools: {}", tools::names().join(", "))]
pub struct UnknownTools {
    /// The rejected part of the text.
    pub text: String,
}

impl FromStr for Selection {
    type Err = UnknownTools;

    fn from_str(text: &str) -> Result<Self, UnknownTools> {
        let sets = [Set::Compat, Set::Core, Set::All];
        if let Some(set) = sets.into_iter().find(|set| set.as_str() == text) {
            return Ok(Self::Set(set));
        }
        let known = tools::names();
        let names: Vec<String> = text.split(',').map(|name| name.trim().to_owned()).collect();
        match names.iter().find(|name| !known.contains(&name.as_str())) {
            Some(unknown) => Err(UnknownTools {
                text: unknown.chars().take(64).collect(),
            }),
            None => Ok(Self::Names(names)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(text: &str, read_only: bool) -> Vec<&'static str> {
        let options = Options {
            tools: text.parse().unwrap(),
            read_only,
            ..Options::default()
        };
        let tools = tools::all().iter().filter(|tool| options.offers(tool));
        tools.map(|tool| tool.name).collect()
    }

    #[test]
    fn each_set_has_the_one_before_it() {
        let (compat, core, all) = (
            offered("compat", false),
            offered("core", false),
            offered("all", false),
        );
        assert_eq!((compat.len(), core.len()), (11, 21));
        assert!(compat.iter().all(|name| core.contains(name)));
        assert!(core.iter().all(|name| all.contains(name)) && all.len() > core.len());
        assert_eq!(offered("exec_command, read_file", false).len(), 2);
        assert_eq!(offered("exec_command,read_file", true), ["read_file"]);
        for name in offered("all", true) {
            assert!(!name.contains("kill") && !name.contains("exec"), "{name}");
        }
    }

    #[test]
    fn unknown_names_are_refused() {
        for text in ["", "cores", "exec_command,", "rm"] {
            assert!(text.parse::<Selection>().is_err(), "{text:?}");
        }
    }
}
