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
