//! Ids of live sandboxes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::NodeName;

/// The longest ID that is accepted.
const MAX_LEN: usize = 63;
/// Characters after `sb`: 8 hexadecimal digits of time and 16 of chance. A node may put its own prefix before them.
const MIN_DIGITS: usize = 24;

/// The ID of a sandbox, such as `sb6917a1b20f3c9a51d2e4b687`.
///
/// `sb` and then at least 24 lower-case letters and digits: one part of a DNS label without dashes, so `PORT-ID` names a port
/// of a sandbox. The last 24 characters are the time of creation and 64 random bits; a host of a fleet puts the name of its
/// node before them. IDs of earlier versions (`sb-6917a1b2-0f3c9a51d2e4b687`) are accepted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(String);

/// Why a string is not a [`SandboxId`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{text:?} is not a sandbox ID: expected \"sb\" and then 24 to 61 lower-case letters and digits"
)]
pub struct InvalidSandboxId {
    /// The given text, cut to a printable length.
    pub text: String,
}

impl SandboxId {
    /// Builds an ID from the second it was made in and 64 random bits.
    pub fn from_parts(unix_seconds: u64, random: u64) -> Self {
        Self::on(None, unix_seconds, random)
    }

    /// The same for a host of a fleet, whose name becomes part of the ID.
    pub fn on(node: Option<&NodeName>, unix_seconds: u64, random: u64) -> Self {
        let node = node.map_or("", NodeName::as_str);
        Self(format!("sb{node}{unix_seconds:08x}{random:016x}"))
    }

    /// The host of the fleet that has the sandbox. None for an ID without such a name.
    pub fn node(&self) -> Option<NodeName> {
        let rest = self.0.strip_prefix("sb")?;
        let name = rest.get(..rest.len().checked_sub(MIN_DIGITS)?)?;
        name.parse().ok()
    }

    /// The ID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SandboxId {
    type Err = InvalidSandboxId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let valid = text.len() <= MAX_LEN
            && text.strip_prefix("sb").is_some_and(|rest| {
                match rest.strip_prefix('-') {
                    // The form of earlier versions.
                    Some(old) => {
                        !old.is_empty()
                            && old.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
                    }
                    None => {
                        rest.len() >= MIN_DIGITS
                            && rest
                                .bytes()
                                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
                    }
                }
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
    fn a_made_id_parses_and_is_part_of_a_dns_label() {
        let id = SandboxId::from_parts(0x6917_a1b2, 0x0f3c_9a51_d2e4_b687);
        assert_eq!(id.as_str(), "sb6917a1b20f3c9a51d2e4b687");
        assert_eq!(id.as_str().parse::<SandboxId>().unwrap(), id);
        // A port and the prefix of a node fit beside it.
        assert!(format!("65535-{}", id.as_str()).len() + 5 <= 63);
    }

    #[test]
    fn a_node_prefix_and_the_old_form_are_accepted() {
        for text in [
            "sbk3f9q6917a1b20f3c9a51d2e4b687",
            "sb-6917a1b2-0f3c9a51d2e4b687",
            "sb-1",
        ] {
            assert_eq!(text.parse::<SandboxId>().unwrap().as_str(), text);
        }
    }

    #[test]
    fn the_node_is_part_of_the_id() {
        let node: NodeName = "k3f9q".parse().unwrap();
        let id = SandboxId::on(Some(&node), 0x6917_a1b2, 0x0f3c_9a51_d2e4_b687);
        assert_eq!(id.as_str(), "sbk3f9q6917a1b20f3c9a51d2e4b687");
        assert_eq!(id.as_str().parse::<SandboxId>().unwrap().node(), Some(node));
        // A port and the ID fit into a DNS label.
        assert!(format!("65535-{id}").len() <= 63);
        for text in [
            "sb6917a1b20f3c9a51d2e4b687",
            "sb-6917a1b2-0f3c9a51d2e4b687",
            "sb-1",
        ] {
            assert_eq!(text.parse::<SandboxId>().unwrap().node(), None, "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let long = format!("sb{}", "a".repeat(62));
        let upper = "sb6917A1B20f3c9a51d2e4b687";
        for text in [
            "", "sb", "sb-", "sb-../x", "x", "sb-a_b", "sb-ä", "sbin", upper, &long,
        ] {
            assert!(text.parse::<SandboxId>().is_err(), "{text:?} was accepted");
        }
    }
}
