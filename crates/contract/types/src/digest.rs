//! Content digests.

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
    /// What was given, cut to a printable length.
    pub text: String,
}

impl Digest {
    /// The digits without the prefix: a file name.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || InvalidDigest {
            text: text.chars().take(80).collect(),
        };
        let hex = text.strip_prefix("b3:").ok_or_else(error)?;
        if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(error());
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| error())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| error())?;
        }
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
