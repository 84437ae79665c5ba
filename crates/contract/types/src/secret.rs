//! Names and values of secrets.
//!
//! A [`SecretValue`] cannot be printed or serialised by accident: its `Debug` form hides it, it has no `Serialize`, and
//! its bytes are overwritten when it is dropped.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;
use zeroize::Zeroizing;

/// The longest name of a secret.
const MAX_NAME: usize = 63;
/// The longest value of a secret, in bytes.
pub const MAX_SECRET: usize = 4096;

/// The name of a secret of one owner, such as `openai`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SecretName(String);

/// A text that is not the name of a secret.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{text:?} is not the name of a secret: expected a letter or digit and then at most 62 letters, digits, '-' and '_'"
)]
pub struct InvalidSecretName {
    /// The given text, cut to a printable length.
    pub text: String,
}

impl SecretName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for SecretName {
    type Err = InvalidSecretName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rest = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        let starts = |b: &u8| b.is_ascii_alphanumeric();
        match text.as_bytes() {
            [first, all @ ..]
                if starts(first) && all.len() < MAX_NAME && all.iter().all(|b| rest(*b)) =>
            {
                Ok(Self(text.to_owned()))
            }
            _ => Err(InvalidSecretName {
                text: text.chars().take(MAX_NAME).collect(),
            }),
        }
    }
}

impl TryFrom<String> for SecretName {
    type Error = InvalidSecretName;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<SecretName> for String {
    fn from(name: SecretName) -> Self {
        name.0
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The value of a secret: text that can stand in a header of HTTP.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretValue(Zeroizing<String>);

/// Why a value is refused. The message never repeats the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum InvalidSecretValue {
    #[error("the value of a secret must not be empty")]
    Empty,
    #[error("the value of a secret has at most {MAX_SECRET} bytes, this one has {len}")]
    TooLong { len: usize },
    #[error(
        "the value of a secret has printable ASCII characters only, without spaces at its ends, because it stands in a header"
    )]
    Unprintable,
}

impl SecretValue {
    pub fn new(text: String) -> Result<Self, InvalidSecretValue> {
        // Dropped, and with it overwritten, on every way out.
        let text = Zeroizing::new(text);
        if text.is_empty() {
            return Err(InvalidSecretValue::Empty);
        }
        if text.len() > MAX_SECRET {
            return Err(InvalidSecretValue::TooLong { len: text.len() });
        }
        let printable = text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
        if !printable || text.trim().len() != text.len() {
            return Err(InvalidSecretValue::Unprintable);
        }
        Ok(Self(text))
    }

    /// The value itself. Callers write it into a request to its host, or into the sealed store, and nowhere else.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for SecretValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretValue(hidden)")
    }
}

impl<'de> Deserialize<'de> for SecretValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["openai", "A", "9-a_b", &"a".repeat(63)] {
            assert_eq!(good.parse::<SecretName>().unwrap().as_str(), good);
        }
        for bad in ["", "-a", "_a", "a b", "a/b", "ä", "a}", &"a".repeat(64)] {
            assert!(bad.parse::<SecretName>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_value_fits_into_a_header_and_is_not_shown() {
        for bad in ["", " a", "a ", "a\r\nb", "a\0", "\u{e9}", &"a".repeat(4097)] {
            let error = SecretValue::new(bad.to_owned()).unwrap_err();
            assert!(!format!("{error}{error:?}").contains("aaa"), "{error}");
        }
        let value = SecretValue::new("sk-very secret".into()).unwrap();
        assert_eq!(value.expose(), "sk-very secret");
        assert!(!format!("{value:?}").contains("very"));
        let error = serde_json::from_str::<SecretValue>("\"sk-\\nvery\"").unwrap_err();
        assert!(!error.to_string().contains("very"), "{error}");
    }
}
