//! [`HubError`]: why an artifact cannot be written, read or trusted.

use std::io;

use forkd_oci::OciError;
use forkd_oci::digest::Digest;
use forkd_oci::registry::RegistryError;
use forkd_types::PathError;
use thiserror::Error;

/// The classes of errors that callers act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The artifact is malformed or exceeds a limit.
    Invalid,
    /// Bytes do not match the digest that names them.
    Digest,
    /// The signature is missing, wrong, or of a key that is not trusted.
    Untrusted,
    /// This host cannot run the memory of the artifact.
    Incompatible,
    /// Keys or tokens were found.
    Secrets,
    /// A name does not exist.
    NotFound,
    /// The file system is full.
    NoSpace,
    /// Any other failure to read or write.
    Io,
    /// The caller gave up.
    Cancelled,
}

/// Why an artifact cannot be used.
#[derive(Debug, Error)]
pub enum HubError {
    #[error(transparent)]
    Path(#[from] PathError),
    #[error("the stream of the artifact broke off")]
    Stream(#[source] io::Error),
    #[error("the artifact is invalid: {problem}")]
    Invalid { problem: String },
    #[error("the artifact is invalid: {what} does not parse")]
    Syntax {
        what: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error("the artifact has {what} {found}, this program knows {known}")]
    Version {
        what: &'static str,
        found: String,
        known: String,
    },
    #[error("{what} should have the digest {expected}, but its bytes have {found}")]
    Digest {
        what: String,
        expected: String,
        found: String,
    },
    #[error("the pack {digest} is needed and was not sent")]
    MissingPack { digest: Digest },
    #[error("the artifact {digest} has no signature")]
    Unsigned { digest: Digest },
    #[error("the signature of {digest} is not trusted: {reason}")]
    Untrusted { digest: Digest, reason: String },
    #[error("this host cannot run the memory of {name}: {reason}")]
    Incompatible { name: String, reason: String },
    #[error("{count} keys or tokens were found: {found}")]
    Secrets { count: u64, found: String },
    #[error("there is no snapshot {name:?} in {place}; there is: {there}")]
    NoName {
        name: String,
        place: String,
        there: String,
    },
    #[error("{place} is a container image, not a snapshot")]
    ContainerImage { place: String },
    #[error("{place} is a pack of forkd 0.5, made for Firecracker: {summary}")]
    Published { place: String, summary: String },
    #[error("the transfer failed")]
    Remote(#[from] RegistryError),
    #[error("the request was cancelled")]
    Cancelled,
}

impl HubError {
    /// An artifact that breaks a rule of the format.
    pub fn invalid(problem: impl Into<String>) -> Self {
        Self::Invalid {
            problem: problem.into(),
        }
    }

    /// The class of the error, for programs.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Path(error) if error.is_no_space() => Kind::NoSpace,
            Self::Path(_) | Self::Stream(_) => Kind::Io,
            Self::Invalid { .. } | Self::Syntax { .. } | Self::MissingPack { .. } => Kind::Invalid,
            Self::ContainerImage { .. } => Kind::Invalid,
            Self::Version { .. } | Self::Incompatible { .. } | Self::Published { .. } => {
                Kind::Incompatible
            }
            Self::Digest { .. } => Kind::Digest,
            Self::Remote(RegistryError::Image(OciError::Digest { .. })) => Kind::Digest,
            Self::Remote(RegistryError::NotFound { .. }) => Kind::NotFound,
            Self::Remote(_) => Kind::Io,
            Self::Unsigned { .. } | Self::Untrusted { .. } => Kind::Untrusted,
            Self::Secrets { .. } => Kind::Secrets,
            Self::NoName { .. } => Kind::NotFound,
            Self::Cancelled => Kind::Cancelled,
        }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::MissingPack { .. } => {
                "a snapshot that had these pages was deleted meanwhile; try again".into()
            }
            Self::Unsigned { .. } => {
                "ask the publisher to push with --sign KEY, or leave the requirement out".into()
            }
            Self::Untrusted { .. } => {
                "add the key to the file of allowed signers if you trust its owner".into()
            }
            Self::Incompatible { .. } => {
                "--memory never takes the disk and boots the parent on this host".into()
            }
            Self::Secrets { .. } => {
                "remove them in the guest and freeze it again, or share them with --allow-secrets"
                    .into()
            }
            Self::ContainerImage { .. } => {
                "build a root disk from it with `forkd-image build --from SOURCE`".into()
            }
            Self::Published { .. } => {
                "its memory cannot run here; unpack the disk with `zstd -d ID.rootfs.zst -o root.ext4` and freeze \
                 it again with `forkd snapshot --rootfs root.ext4 --tag TAG`"
                    .into()
            }
            Self::Remote(RegistryError::Denied { credential, .. }) => match credential {
                false => "log in with `docker login` or `podman login`; forkd reads the same files".into(),
                true => "the credential has no right to this repository or bucket".into(),
            },
            Self::Remote(error) if error.is_temporary() => {
                "run the command again: it goes on where it ended".into()
            }
            Self::Version { .. } => "a newer version of forkd may read it".into(),
            _ => return None,
        })
    }
}
