//! [`MachineName`]: a validated machine name.
//!
//! A name becomes a directory name and part of a socket path, so its characters and its length are limited.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// A machine's name: 1 to 40 characters `a-z A-Z 0-9 _ -`, the first not a dash. Safe as a file name
/// and short enough for a socket path below it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MachineName(String);

/// The text is not a valid machine name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid machine name {name:?}: use 1 to {} letters, digits, `_` and `-`, not starting with `-`",
    MachineName::MAX_LEN
)]
pub struct InvalidMachineName {
    pub name: String,
}

impl MachineName {
    pub const MAX_LEN: usize = 40;

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A name for one directory: the prefix and a hash of the path. Two clones of a source tree never share a
    /// machine.
    pub fn for_path(prefix: &str, path: &Path) -> Result<Self, InvalidMachineName> {
        let hash = blake3::hash(path.as_os_str().as_encoded_bytes());
        format!("{prefix}-{}", &hash.to_hex()[..12]).parse()
    }
}

impl Default for MachineName {
    fn default() -> Self {
        Self("default".to_owned())
    }
}

impl FromStr for MachineName {
    type Err = InvalidMachineName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if (1..=Self::MAX_LEN).contains(&text.len())
            && !text.starts_with('-')
            && text.chars().all(legal)
        {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidMachineName {
                name: text.to_owned(),
            })
        }
    }
}

impl fmt::Display for MachineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_directory() {
        for bad in ["", "..", "a/b", "-rf", "a b", "ä", &"x".repeat(41)] {
            assert!(bad.parse::<MachineName>().is_err(), "{bad:?} was accepted");
        }
        for good in ["default", "test-0a1b", "_x", "A9"] {
            assert_eq!(good.parse::<MachineName>().unwrap().as_str(), good);
        }
    }

    #[test]
    fn two_paths_have_two_names() {
        let name = |path: &str| MachineName::for_path("test", Path::new(path)).unwrap();
        assert_eq!(name("/src/a"), name("/src/a"));
        assert_ne!(name("/src/a"), name("/src/b"));
        assert!(MachineName::for_path("a/b", Path::new("/")).is_err());
    }
}
