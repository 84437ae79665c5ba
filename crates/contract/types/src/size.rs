//! Sizes of guest memory and disks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The page size of every guest we run.
pub const PAGE_SIZE: u64 = 4096;

/// A size in mebibytes. Parsed from `512`, `512M`, `512MiB`, `2G` or `2GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MiB(pub u32);

/// Why a string is not a size.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is not a size: write 512, 512M or 2G")]
pub struct InvalidSize {
    /// The text that was refused.
    pub text: String,
}

impl MiB {
    /// The size in bytes.
    pub const fn bytes(self) -> u64 {
        self.0 as u64 * 1024 * 1024
    }

    /// The size in guest pages.
    pub const fn pages(self) -> u64 {
        self.bytes() / PAGE_SIZE
    }
}

impl FromStr for MiB {
    type Err = InvalidSize;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || InvalidSize {
            text: text.chars().take(32).collect(),
        };
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let factor = match &text[digits.len()..] {
            "" | "M" | "m" | "MiB" => 1,
            "G" | "g" | "GiB" => 1024,
            _ => return Err(error()),
        };
        let number: u32 = digits.parse().map_err(|_| error())?;
        number.checked_mul(factor).map(MiB).ok_or_else(error)
    }
}

impl fmt::Display for MiB {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 >= 1024 && self.0.is_multiple_of(1024) {
            write!(f, "{} GiB", self.0 / 1024)
        } else {
            write!(f, "{} MiB", self.0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_people_write() {
        for (text, want) in [
            ("512", 512),
            ("512M", 512),
            ("2G", 2048),
            ("2GiB", 2048),
            ("0", 0),
        ] {
            assert_eq!(text.parse::<MiB>(), Ok(MiB(want)));
        }
        for text in ["", "G", "-1", "1T", "1.5G", "4194304G"] {
            assert!(text.parse::<MiB>().is_err(), "{text:?} was accepted");
        }
    }
}
