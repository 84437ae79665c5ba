//! Domain names and patterns of them.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// The longest name, in characters.
const MAX_NAME: usize = 253;
/// The longest label between two dots.
const MAX_LABEL: usize = 63;

/// A host name in lower case, without a dot at its end: `files.packages.example`.
///
/// The last label has a letter, so no name is also an address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainName(String);

/// Why a text is not a host name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum InvalidDomain {
    #[error("the name is empty or has an empty part")]
    Empty,
    #[error("the name has more than {MAX_NAME} characters or a part of more than {MAX_LABEL}")]
    TooLong,
    #[error("the name has {found:?}; only letters, digits, '-' and '_' stand between dots")]
    BadCharacter { found: char },
    #[error("the last part of a name has a letter")]
    Numeric,
}

impl DomainName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DomainName {
    type Err = InvalidDomain;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.len() > MAX_NAME {
            return Err(InvalidDomain::TooLong);
        }
        for label in text.split('.') {
            if label.is_empty() {
                return Err(InvalidDomain::Empty);
            }
            if label.len() > MAX_LABEL {
                return Err(InvalidDomain::TooLong);
            }
            let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            if let Some(found) = label.chars().find(|c| !allowed(*c)) {
                return Err(InvalidDomain::BadCharacter { found });
            }
        }
        let last = text.rsplit('.').next().unwrap_or_default();
        if !last.bytes().any(|byte| byte.is_ascii_alphabetic()) || last.starts_with("0x") {
            return Err(InvalidDomain::Numeric);
        }
        Ok(Self(text.to_ascii_lowercase()))
    }
}

impl fmt::Display for DomainName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One name, or every name below one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum NamePattern {
    /// `packages.example`: this name and no other.
    Exact(DomainName),
    /// `*.packages.example`: every name below, at any depth, but not `packages.example`.
    Below(DomainName),
}

impl NamePattern {
    pub fn matches(&self, name: &DomainName) -> bool {
        match self {
            Self::Exact(own) => own == name,
            Self::Below(own) => name
                .as_str()
                .strip_suffix(own.as_str())
                .is_some_and(|rest| rest.ends_with('.')),
        }
    }
}

impl FromStr for NamePattern {
    type Err = InvalidDomain;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("*.") {
            Some(rest) => Ok(Self::Below(rest.parse()?)),
            None => Ok(Self::Exact(text.parse()?)),
        }
    }
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => write!(f, "{name}"),
            Self::Below(name) => write!(f, "*.{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_below_and_not_the_name_itself() {
        let pattern: NamePattern = "*.Packages.example".parse().unwrap();
        let matches = |name: &str| pattern.matches(&name.parse().unwrap());
        assert!(matches("a.packages.example"));
        assert!(matches("A.B.packages.EXAMPLE."));
        assert!(!matches("packages.example"));
        assert!(!matches("evilpackages.example"));
        let exact: NamePattern = "packages.example".parse().unwrap();
        assert!(exact.matches(&"PACKAGES.example.".parse().unwrap()));
        assert!(!exact.matches(&"a.packages.example".parse().unwrap()));
    }

    #[test]
    fn addresses_and_odd_names_are_refused() {
        for text in [
            "",
            ".",
            "a..b",
            "1.2.3.4",
            "0x7f.1",
            "0x7f000001",
            "2130706433",
            "a b",
            "ä.example",
            "a.*",
        ] {
            assert!(text.parse::<DomainName>().is_err(), "{text:?} was accepted");
        }
        assert!("a".repeat(64).parse::<DomainName>().is_err());
        assert!("_dmarc.a-b.example".parse::<DomainName>().is_ok());
    }

    proptest::proptest! {
        #[test]
        fn a_name_reads_back_as_itself(text in "([a-zA-Z0-9_-]{1,12}\\.){0,4}[a-z]{2,6}\\.?") {
            let name: DomainName = text.parse().unwrap();
            proptest::prop_assert_eq!(name.to_string().parse::<DomainName>().unwrap(), name);
        }

        #[test]
        fn any_text_is_survived(text in ".*") {
            let _ = text.parse::<NamePattern>();
        }
    }
}
