//! Snapshot tags: the names people give to frozen machines.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The longest tag that is accepted.
const MAX_LEN: usize = 64;

/// A name for a snapshot: 1 to 64 of `A-Z a-z 0-9 . _ -`, not starting with `.` or `-`.
///
/// A tag is safe as a file name by construction: it holds no separator, and it is neither hidden nor
/// mistaken for an option.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tag(String);

/// Why a string is not a [`Tag`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidTag {
    /// The string is empty.
    #[error("a tag must not be empty")]
    Empty,
    /// The string is longer than any tag may be.
    #[error("a tag has at most {MAX_LEN} characters, this one has {len}")]
    TooLong {
        /// How many characters were given.
        len: usize,
    },
    /// A character that is not allowed, or not allowed as the first one.
    #[error(
        "a tag may not have {found:?} at position {at}: letters, digits, '.', '_' and '-' only, starting with a letter, digit or '_'"
    )]
    BadCharacter {
        /// The offending character.
        found: char,
        /// Position, counted from 0.
        at: usize,
    },
}

impl Tag {
    /// The tag as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Tag {
    type Err = InvalidTag;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Err(InvalidTag::Empty);
        }
        if text.chars().count() > MAX_LEN {
            return Err(InvalidTag::TooLong {
                len: text.chars().count(),
            });
        }
        for (at, found) in text.chars().enumerate() {
            let inner = found.is_ascii_alphanumeric() || found == '_';
            let allowed = inner || (at > 0 && matches!(found, '.' | '-'));
            if !allowed {
                return Err(InvalidTag::BadCharacter { found, at });
            }
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for Tag {
    type Error = InvalidTag;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Tag> for String {
    fn from(tag: Tag) -> Self {
        tag.0
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyday_tags_are_accepted() {
        for text in ["py", "py-3.12", "_x", "0", "branch-sb-1-2", "A.b_c-d"] {
            assert_eq!(text.parse::<Tag>().unwrap().as_str(), text);
        }
    }

    #[test]
    fn what_could_leave_a_directory_is_refused() {
        for text in [
            "", ".", "..", "../x", "a/b", "-rf", ".hidden", "a\0b", "ä", "a b",
        ] {
            assert!(text.parse::<Tag>().is_err(), "{text:?} was accepted");
        }
        assert_eq!(
            "x".repeat(65).parse::<Tag>(),
            Err(InvalidTag::TooLong { len: 65 })
        );
    }

    #[test]
    fn json_goes_through_the_same_door() {
        assert!(serde_json::from_str::<Tag>("\"../etc\"").is_err());
        assert_eq!(
            serde_json::to_string(&"ok".parse::<Tag>().unwrap()).unwrap(),
            "\"ok\""
        );
    }

    proptest::proptest! {
        #[test]
        fn no_accepted_tag_is_a_path(text in ".{0,80}") {
            if let Ok(tag) = text.parse::<Tag>() {
                let path = std::path::Path::new("/base").join(tag.as_str());
                assert_eq!(path.parent().unwrap(), std::path::Path::new("/base"));
            }
        }
    }
}
