//! Names of VM engines.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

/// The longest name of an engine, in bytes.
const MAX_LEN: usize = 16;

/// The VM engine that machine state belongs to: 1 to 16 lower-case letters, digits and dashes.
///
/// Machine state is private to the engine that wrote it. A snapshot names its engine, and only a VMM of the same
/// engine can restore it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Engine {
    /// The name, padded with zero bytes.
    name: [u8; MAX_LEN],
}

/// Why a text is rejected as the name of an engine.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is an invalid engine name: 1 to {MAX_LEN} of a-z, 0-9 and '-' are allowed")]
pub struct InvalidEngine {
    text: String,
}

impl Engine {
    /// The engine of `forkd-vmm`.
    pub const FORKD: Self = Self {
        name: *b"forkd\0\0\0\0\0\0\0\0\0\0\0",
    };

    /// The engine of `forkd-fc`, which drives an installed Firecracker.
    pub const FIRECRACKER: Self = Self {
        name: *b"firecracker\0\0\0\0\0",
    };

    /// The name as text.
    pub fn as_str(&self) -> &str {
        let end = self.name.iter().position(|byte| *byte == 0);
        let name = self.name.get(..end.unwrap_or(MAX_LEN)).unwrap_or_default();
        // Only ASCII passes the parser.
        std::str::from_utf8(name).unwrap_or_default()
    }
}

impl FromStr for Engine {
    type Err = InvalidEngine;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
        let mut name = [0; MAX_LEN];
        match name.get_mut(..text.len()) {
            Some(place) if !text.is_empty() && text.bytes().all(allowed) => {
                place.copy_from_slice(text.as_bytes());
                Ok(Self { name })
            }
            _ => Err(InvalidEngine {
                text: text.chars().take(64).collect(),
            }),
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine({})", self.as_str())
    }
}

impl Serialize for Engine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for Engine {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_short_lower_case_ascii() {
        assert_eq!("forkd".parse(), Ok(Engine::FORKD));
        assert_eq!("firecracker".parse(), Ok(Engine::FIRECRACKER));
        let longest: Engine = "abcdefgh-1234567".parse().unwrap();
        assert_eq!(longest.as_str(), "abcdefgh-1234567");
        for bad in ["", "Forkd", "a b", "a\0", "é", "abcdefgh-12345678"] {
            assert!(bad.parse::<Engine>().is_err(), "{bad:?}");
        }
    }
}
