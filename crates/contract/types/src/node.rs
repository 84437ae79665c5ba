//! Names of the hosts of a fleet.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The name of a host in a fleet, such as `k3f9q`: five lower-case letters and digits.
///
/// It is part of the IDs of the host's sandboxes, so a gateway finds the host of a sandbox without a table.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeName(String);

/// Why a string is not a [`NodeName`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is not the name of a node: expected five lower-case letters and digits")]
pub struct InvalidNodeName {
    /// The given text, cut to a printable length.
    pub text: String,
}

impl NodeName {
    /// Characters of a name.
    pub const LEN: usize = 5;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for NodeName {
    type Err = InvalidNodeName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fits = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        if text.len() == Self::LEN && text.bytes().all(fits) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidNodeName {
                text: text.chars().take(60).collect(),
            })
        }
    }
}

impl TryFrom<String> for NodeName {
    type Error = InvalidNodeName;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<NodeName> for String {
    fn from(name: NodeName) -> Self {
        name.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_five_letters_and_digits() {
        assert_eq!("k3f9q".parse::<NodeName>().unwrap().as_str(), "k3f9q");
        for text in ["", "k3f9", "k3f9qq", "K3f9q", "k3f-q", "k3fä"] {
            assert!(text.parse::<NodeName>().is_err(), "{text:?} was accepted");
        }
    }
}
