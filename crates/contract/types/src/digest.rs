//! Digests of content: BLAKE3, written as `b3:` and hexadecimal digits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A BLAKE3 digest, written `b3:` and 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

/// Why a string is not a [`Digest`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is not a digest: expected \"b3:\" and 64 hex digits")]
pub struct InvalidDigest {
    /// The text that was refused, cut to a printable length.
    pub text: String,
}

impl Digest {
    /// The digits without the prefix, usable as a file name.
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || InvalidDigest {
            text: text.chars().take(80).collect(),
        };
        let digits = text.strip_prefix("b3:").ok_or_else(error)?;
        let mut bytes = [0; 32];
        hex::decode_to_slice(digits, &mut bytes).map_err(|_| error())?;
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidDigest;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b3:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let digest = Digest([0xab; 32]);
        assert_eq!(digest.to_string().parse::<Digest>(), Ok(digest));
        for text in [
            "",
            "b3:",
            "sha256:00",
            "b3:zz",
            &format!("b3:{}", "0".repeat(63)),
        ] {
            assert!(text.parse::<Digest>().is_err());
        }
    }
}
