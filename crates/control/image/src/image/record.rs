//! `image.json`: the description of an image.
//!
//! The daemon reads memory, vCPUs, environment and warm-up from this file. `schema` is its version; other
//! versions are refused.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::FileDigest;
use crate::recipe::{Recipe, Warmup};
use crate::root::{PackageRecord, Root, Source};
use forkd_types::{Digest, MiB};

pub const SCHEMA: u32 = 1;

/// Content of `image.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    pub schema: u32,
    pub name: String,
    pub description: String,
    pub recipe: Digest,
    pub source: Source,
    /// The disk, `root.ext4` beside the record.
    pub disk: FileDigest,
    pub uuid: String,
    /// Default guest memory.
    pub memory_mib: MiB,
    /// Default number of vCPUs.
    pub vcpus: u8,
    /// Environment of every process in the guest.
    pub env: BTreeMap<String, String>,
    /// Work to do before the parent is frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup: Option<Warmup>,
    /// Release of the kernel whose modules are in the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    pub packages: Vec<PackageRecord>,
}

impl ImageRecord {
    pub(super) fn new(recipe: &Recipe, root: Root, disk: FileDigest) -> Self {
        Self {
            schema: SCHEMA,
            name: recipe.name.to_string(),
            description: recipe.description.clone(),
            recipe: crate::digest::of_bytes(&recipe.fingerprint()),
            source: root.source,
            disk,
            uuid: String::new(),
            memory_mib: recipe.memory,
            vcpus: recipe.vcpus,
            env: recipe.env.clone(),
            warmup: recipe.warmup.clone(),
            kernel: root.kernel,
            packages: root.packages,
        }
    }

    /// Parses a record. The error is the reason in words.
    pub fn parse(text: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        let version: Version = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if version.schema != SCHEMA {
            return Err(format!(
                "its format is version {}, and {SCHEMA} is the one known",
                version.schema
            ));
        }
        serde_json::from_slice(text).map_err(|error| error.to_string())
    }

    pub fn to_json(&self) -> String {
        format!("{:#}\n", serde_json::json!(self))
    }
}
