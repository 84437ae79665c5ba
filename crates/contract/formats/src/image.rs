//! `image.json`: what an image is and what it is made of.

use std::collections::BTreeMap;

use forkd_types::{Digest, MiB};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::prepare::{Preparation, WarmupStep};

/// Version of the record. Version 1 has no `run` and knows no container images, version 2 knows no health check, version
/// 3 has one `warmup` in place of `prepare`. All are still read.
pub const SCHEMA: u32 = 4;
/// Name of the record, in the folder of the image.
pub const RECORD: &str = "image.json";
/// Name of the root disk, in the folder of the image.
pub const DISK: &str = "root.ext4";
/// The largest record that is read.
pub const MAX_BYTES: u64 = 16 << 20;

/// Why bytes are not a record of an image.
#[derive(Debug, Error)]
pub enum ImageRecordError {
    #[error("the image record does not parse")]
    Parse(#[source] serde_json::Error),
    #[error("the image record has version {found}, this program knows 1 to {SCHEMA}")]
    Version { found: u32 },
}

/// An image, as `forkd-image` describes it and the daemon uses it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    /// The version of the form, [`SCHEMA`].
    pub schema: u32,
    pub name: String,
    /// A sentence for people.
    pub description: String,
    /// Digest of the recipe that the image was made from.
    pub recipe: Digest,
    /// Where the files came from.
    pub source: ImageSource,
    /// The root disk beside the record.
    pub disk: FileDigest,
    /// UUID of the file system on the root disk.
    pub uuid: String,
    /// Guest memory, unless a request asks for another size.
    pub memory_mib: MiB,
    /// Number of vCPUs, unless a request asks for another number.
    pub vcpus: u8,
    /// Environment of every process in the guest.
    pub env: BTreeMap<String, String>,
    /// The warm-up as versions 1 to 3 have it. [`ImageRecord::parse`] moves it to `prepare`.
    #[serde(default, skip_serializing)]
    warmup: Option<Warmup>,
    /// Preparation of the parent before it is frozen, and the check of its children.
    #[serde(default, skip_serializing_if = "Preparation::is_empty")]
    pub prepare: Preparation,
    /// Release of the kernel whose modules are in the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Every package in the image.
    pub packages: Vec<PackageRecord>,
    /// How the programs of the image expect to run.
    #[serde(default, skip_serializing_if = "RunDefaults::is_empty")]
    pub run: RunDefaults,
}

/// How the programs of a container image expect to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunDefaults {
    /// `USER`, `USER:GROUP`, or numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub working_dir: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// TCP ports that the image says it listens on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// `CMD` and arguments, or `CMD-SHELL` and a line.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub healthcheck: Vec<String>,
}

impl RunDefaults {
    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The size and digest of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDigest {
    /// Length in bytes.
    pub size: u64,
    /// BLAKE3 digest of the content.
    pub digest: Digest,
}

/// A package in a root file system.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackageRecord {
    pub name: String,
    pub version: String,
}

/// Where the files of a root came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ImageSource {
    /// Packages of Debian.
    Debian {
        /// The release of Debian.
        suite: String,
        /// The packages that were there before those of the recipe.
        variant: Variant,
    },
    /// A container image.
    Oci {
        /// Where it was found.
        image: String,
        /// The digest of its manifest, or what stands for it.
        digest: String,
    },
}

/// How much of Debian is there before the recipe's packages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// The essential packages only.
    Essential,
    /// The essential packages and apt.
    Apt,
    /// The required packages and apt.
    #[default]
    Minbase,
}

impl Variant {
    /// The name mmdebstrap knows it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Essential => "essential",
            Self::Apt => "apt",
            Self::Minbase => "minbase",
        }
    }
}

/// An interpreter that is started and kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interpreter {
    Python,
    Node,
}

impl Interpreter {
    /// The name by which the guest agent knows the language.
    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "python",
            Self::Node => "node",
        }
    }
}

/// Preparation of a parent before it is frozen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Warmup {
    /// The interpreter that is started and kept.
    pub interpreter: Interpreter,
    /// Modules to import, each as `module` or `module as name`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub imports: Vec<String>,
    /// Code to run after the imports.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub code: String,
}

impl ImageRecord {
    /// Parses a record. Another version is refused before anything else of it is looked at.
    pub fn parse(text: &[u8]) -> Result<Self, ImageRecordError> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        let version: Version = serde_json::from_slice(text).map_err(ImageRecordError::Parse)?;
        if !(1..=SCHEMA).contains(&version.schema) {
            return Err(ImageRecordError::Version {
                found: version.schema,
            });
        }
        let mut record: Self = serde_json::from_slice(text).map_err(ImageRecordError::Parse)?;
        if let Some(warmup) = record.warmup.take() {
            let step = WarmupStep::Interpreter(warmup);
            record.prepare.warmup.insert(0, step);
        }
        Ok(record)
    }

    /// An empty record of the current version.
    pub fn empty(name: String, source: ImageSource, disk: FileDigest) -> Self {
        Self {
            schema: SCHEMA,
            name,
            description: String::new(),
            recipe: Digest([0; 32]),
            source,
            disk,
            uuid: String::new(),
            memory_mib: MiB(512),
            vcpus: 1,
            env: BTreeMap::new(),
            warmup: None,
            prepare: Preparation::default(),
            kernel: None,
            packages: Vec::new(),
            run: RunDefaults::default(),
        }
    }

    /// The record as text.
    pub fn to_json(&self) -> String {
        format!("{:#}\n", serde_json::json!(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> ImageRecord {
        let source = ImageSource::Debian {
            suite: "trixie".into(),
            variant: Variant::Minbase,
        };
        let disk = FileDigest {
            size: 1,
            digest: Digest([2; 32]),
        };
        let warmup = Warmup {
            interpreter: Interpreter::Python,
            imports: vec!["numpy".into()],
            code: String::new(),
        };
        ImageRecord {
            description: "Python".into(),
            env: BTreeMap::from([("A".into(), "b".into())]),
            prepare: Preparation {
                warmup: vec![WarmupStep::Interpreter(warmup)],
                ..Preparation::default()
            },
            packages: vec![PackageRecord {
                name: "python3".into(),
                version: "3.13".into(),
            }],
            run: RunDefaults {
                user: Some("app".into()),
                ..RunDefaults::default()
            },
            ..ImageRecord::empty("python".into(), source, disk)
        }
    }

    #[test]
    fn a_record_survives_its_text() {
        let record = example();
        let read = ImageRecord::parse(record.to_json().as_bytes()).unwrap();
        assert_eq!(read, record);
    }

    #[test]
    fn other_versions_and_unknown_fields_are_refused() {
        let text = example().to_json();
        let newer = text.replace("\"schema\": 4", "\"schema\": 7");
        assert!(matches!(
            ImageRecord::parse(newer.as_bytes()),
            Err(ImageRecordError::Version { found: 7 })
        ));
        let unknown = text.replace("\"schema\": 4", "\"schema\": 4, \"extra\": 1");
        assert!(matches!(
            ImageRecord::parse(unknown.as_bytes()),
            Err(ImageRecordError::Parse(_))
        ));
    }

    #[test]
    fn the_version_before_is_read() {
        let mut record = example();
        record.run = RunDefaults::default();
        let mut json = serde_json::json!(record);
        json["schema"] = 1.into();
        json["warmup"] = json["prepare"]["warmup"][0]["interpreter"].take();
        json.as_object_mut().unwrap().remove("prepare");
        record.schema = 1;
        let text = json.to_string();
        assert_eq!(ImageRecord::parse(text.as_bytes()).unwrap(), record);
    }

    #[test]
    fn an_interpreter_has_one_name() {
        for one in [Interpreter::Python, Interpreter::Node] {
            let written = serde_json::to_value(one).unwrap();
            assert_eq!(written, serde_json::json!(one.name()));
        }
    }
}
