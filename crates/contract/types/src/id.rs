//! Ids of live sandboxes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The longest id that is accepted.
const MAX_LEN: usize = 64;

/// The id of a sandbox, such as `sb-6917a1b2-0f3c9a51d2e4b687`: `sb-` and then letters, digits, `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(String);

/// Why a string is not a [`SandboxId`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is not a sandbox id: expected \"sb-\" and then 1 to 61 letters, digits or '-'")]
pub struct InvalidSandboxId {
    /// The rejected text, cut to a printable length.
    pub text: String,
}

impl SandboxId {
    /// Builds an id from the second it was made in and 64 random bits.
    pub fn from_parts(unix_seconds: u64, random: u64) -> Self {
        Self(format!("sb-{unix_seconds:08x}-{random:016x}"))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SandboxId {
    type Err = InvalidSandboxId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let valid = text.len() <= MAX_LEN
            && text.strip_prefix("sb-").is_some_and(|rest| {
                !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            });
        if valid {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidSandboxId {
                text: text.chars().take(MAX_LEN).collect(),
            })
        }
    }
}

impl TryFrom<String> for SandboxId {
    type Error = InvalidSandboxId;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> Self {
        id.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_id_parses() {
        let id = SandboxId::from_parts(0x6917_a1b2, 0x0f3c_9a51_d2e4_b687);
        assert_eq!(id.as_str(), "sb-6917a1b2-0f3c9a51d2e4b687");
        assert_eq!(id.as_str().parse::<SandboxId>().unwrap(), id);
    }

    #[test]
    fn anything_else_is_refused() {
        for text in ["", "sb-", "sb-../x", "x", "sb-a_b", "sb-ä"] {
            assert!(text.parse::<SandboxId>().is_err(), "{text:?} was accepted");
        }
    }
}
