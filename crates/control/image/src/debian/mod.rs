//! Debian's packages as the source of kernels and roots.
//!
//! [`mirror`] finds an archive, [`apt`] downloads single packages, [`bootstrap`] builds a root.
//! [`DebianError`] sorts the failures of the underlying programs into those that a user can fix.

pub mod apt;
pub mod bootstrap;
pub mod mirror;

use std::path::PathBuf;

use thiserror::Error;

use crate::cache::CacheError;
use crate::tools::ToolError;

/// The Debian release of kernels and roots.
pub const SUITE: &str = "trixie";

/// The keys of Debian's archive.
pub const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Why Debian's packages are not available.
#[derive(Debug, Error)]
pub enum DebianError {
    #[error("no Debian mirror is configured on this host")]
    NoMirror,
    #[error("{text:?} is not the address of a mirror: expected http://, https:// or file:")]
    BadMirror { text: String },
    #[error("the keys of Debian's archive are not at {}", path.display())]
    NoKeyring {
        /// The expected path.
        path: PathBuf,
    },
    #[error("the signature of the Debian mirror cannot be verified: {detail}")]
    Signature {
        detail: String,
        #[source]
        source: ToolError,
    },
    #[error("the Debian mirror cannot be reached: {detail}")]
    Unreachable {
        detail: String,
        #[source]
        source: ToolError,
    },
    #[error("there is no space left in {}", folder.display())]
    NoSpace {
        /// The folder that was being written.
        folder: PathBuf,
        #[source]
        source: ToolError,
    },
    #[error("Debian {SUITE} has no package {package}")]
    NoPackage { package: String },
    #[error("the record of the package {package} {what}")]
    OddPackage { package: String, what: &'static str },
    /// A program failed in a way we know nothing about.
    #[error("a program of the host failed")]
    Tool(#[from] ToolError),
    #[error("the package cache cannot be used")]
    Cache(#[from] CacheError),
}

/// Sorts a failure of a program into the cases that a user can fix.
fn classify(error: ToolError, folder: &std::path::Path) -> DebianError {
    const SIGNATURE: [&str; 6] = [
        "NO_PUBKEY",
        "BADSIG",
        "is not signed",
        "signatures were invalid",
        "couldn't be verified",
        "cannot be authenticated",
    ];
    const NETWORK: [&str; 7] = [
        "Could not resolve",
        "Temporary failure resolving",
        "Could not connect",
        "Connection failed",
        "Connection refused",
        "Connection timed out",
        "Failed to fetch",
    ];
    let tail = error.tail().to_owned();
    let says = |words: &[&str]| words.iter().any(|word| tail.contains(word));
    if says(&["No space left on device", "don't have enough free space"]) {
        DebianError::NoSpace {
            folder: folder.to_owned(),
            source: error,
        }
    } else if says(&SIGNATURE) {
        DebianError::Signature {
            detail: first_error(&tail),
            source: error,
        }
    } else if let Some(package) = unknown_package(&tail) {
        DebianError::NoPackage { package }
    } else if says(&NETWORK) {
        DebianError::Unreachable {
            detail: first_error(&tail),
            source: error,
        }
    } else {
        DebianError::Tool(error)
    }
}

/// apt prefixes errors with `E:` and warnings with `W:`.
fn first_error(tail: &str) -> String {
    let lines = || tail.split("; ");
    lines()
        .find(|line| line.starts_with("E: ") || line.starts_with("W: GPG"))
        .or_else(|| lines().last())
        .unwrap_or_default()
        .to_owned()
}

fn unknown_package(tail: &str) -> Option<String> {
    let at = tail.split("Unable to locate package ").nth(1)?;
    at.split([';', ' ']).next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::ExitStatus;

    use super::*;

    fn failed(tail: &str) -> DebianError {
        let error = ToolError::Failed {
            program: "apt-get".into(),
            status: ExitStatus::from_raw(100 << 8),
            tail: tail.into(),
        };
        classify(error, Path::new("/cache"))
    }

    #[test]
    fn failures_are_told_apart() {
        assert!(matches!(
            failed(
                "W: GPG error: http://m trixie InRelease: NO_PUBKEY 1; E: The repository is not signed."
            ),
            DebianError::Signature { .. }
        ));
        assert!(matches!(
            failed("E: Failed to fetch http://m Could not resolve 'm'"),
            DebianError::Unreachable { .. }
        ));
        assert!(matches!(
            failed("E: Write error - write (28: No space left on device)"),
            DebianError::NoSpace { .. }
        ));
        assert!(matches!(
            failed("E: Unable to locate package nonsuch; E: apt-get failed"),
            DebianError::NoPackage { package } if package == "nonsuch"
        ));
        assert!(matches!(failed("E: something else"), DebianError::Tool(_)));
    }
}
