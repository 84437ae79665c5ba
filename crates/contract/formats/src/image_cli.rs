//! Standard output of `forkd-image --json`: one JSON object per command, inside a versioned [`Answer`].

use std::path::PathBuf;

use forkd_types::Digest;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Version of the output.
pub const FORMAT: u32 = 1;

/// Why an output cannot be used.
#[derive(Debug, Error)]
pub enum AnswerError {
    #[error("the output of forkd-image does not parse")]
    Parse(#[source] serde_json::Error),
    #[error("the output of forkd-image has version {found}, this program knows {FORMAT}")]
    Version { found: u32 },
}

/// The result of a command together with the version of its form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer<T> {
    /// The version of the form, [`FORMAT`].
    pub format: u32,
    #[serde(flatten)]
    pub made: T,
}

impl<T: Serialize> Answer<T> {
    pub fn new(made: T) -> Self {
        let format = FORMAT;
        Self { format, made }
    }
}

/// Parses the output of one command. Fields that are not known are for people.
pub fn parse<T: DeserializeOwned>(output: &[u8]) -> Result<T, AnswerError> {
    #[derive(Deserialize)]
    struct Version {
        format: u32,
    }
    let version: Version = serde_json::from_slice(output).map_err(AnswerError::Parse)?;
    if version.format != FORMAT {
        return Err(AnswerError::Version {
            found: version.format,
        });
    }
    let answer: Answer<T> = serde_json::from_slice(output).map_err(AnswerError::Parse)?;
    Ok(answer.made)
}

/// The result of `forkd-image kernel`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelMade {
    pub folder: PathBuf,
    /// Release, as `uname -r` prints it.
    pub version: String,
    /// The kernel can be started by PVH.
    pub pvh: bool,
    pub vmlinux: PathBuf,
    pub vmlinuz: Option<PathBuf>,
    pub config: Option<PathBuf>,
    pub modules: Option<PathBuf>,
    pub record: Option<PathBuf>,
}

/// The result of `forkd-image initramfs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitramfsMade {
    pub initramfs: PathBuf,
    pub flavour: String,
    pub kernel_version: String,
    pub agent: PathBuf,
}

/// The result of `forkd-image build`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageMade {
    pub disk: PathBuf,
    /// The file with the [`crate::image::ImageRecord`].
    pub record: PathBuf,
    pub name: String,
    /// Digest of the disk.
    pub digest: Digest,
    /// Number of packages.
    pub packages: usize,
}

/// The result of `forkd-image install`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageInstalled {
    pub image: PathBuf,
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    pub name: String,
}

/// The longest request of `forkd-image fetch`, in bytes.
pub const MAX_REQUEST: u64 = 64 << 10;

/// The first line on the standard input of `forkd-image fetch`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchRequest {
    /// The version of the form, [`FORMAT`].
    pub format: u32,
    /// The name of an image in a registry, or `-` for an archive after this line.
    pub source: String,
    /// The name that the image gets; otherwise one is made from its source and digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    pub disk_mib: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<FetchCredential>,
}

/// A right to read from the registry of the image. It has no `Debug`: nothing may print it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum FetchCredential {
    Password { username: String, password: String },
    Identity { token: String },
    Bearer { token: String },
}

/// One line on the standard output of `forkd-image fetch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FetchLine {
    Progress(FetchProgress),
    /// The last line of a success.
    Done(ImageFetched),
    /// The last line of a failure.
    Failed(FetchFailure),
}

/// How far a fetch has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum FetchProgress {
    Found {
        digest: String,
        layers: usize,
        bytes: u64,
    },
    Fetched {
        bytes: u64,
        of: u64,
    },
    Step {
        text: String,
    },
}

/// The image that lies in the folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFetched {
    pub name: String,
    /// With the registry that it came from.
    pub reference: String,
    /// Names the content.
    pub digest: String,
}

/// Why there is no image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchFailure {
    pub kind: FetchProblem,
    pub message: String,
    pub hint: Option<String>,
}

/// The kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FetchProblem {
    NotFound,
    Denied,
    Unreachable,
    /// The registry of the image is not configured, or not allowed.
    Configuration,
    Platform,
    /// The image or its name cannot be used.
    Invalid,
    NoSpace,
    Internal,
}

/// The result of `forkd-image machine`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineMade {
    pub folder: PathBuf,
    pub kernel_version: String,
    pub vmlinuz: PathBuf,
    pub initramfs: PathBuf,
    pub root: PathBuf,
    pub record: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_survives_and_another_version_is_refused() {
        let made = InitramfsMade {
            initramfs: "/a".into(),
            flavour: "guest".into(),
            kernel_version: "6.12".into(),
            agent: "/b".into(),
        };
        let text = serde_json::to_string(&Answer::new(made.clone())).unwrap();
        assert_eq!(parse::<InitramfsMade>(text.as_bytes()).unwrap(), made);
        let newer = text.replace("\"format\":1", "\"format\":2");
        assert!(matches!(
            parse::<InitramfsMade>(newer.as_bytes()),
            Err(AnswerError::Version { found: 2 })
        ));
        assert!(matches!(
            parse::<ImageMade>(text.as_bytes()),
            Err(AnswerError::Parse(_))
        ));
    }
}
