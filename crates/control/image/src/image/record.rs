//! `image.json`: what an image is and what it is made of.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::digest::FileDigest;
use crate::recipe::{Recipe, Warmup};
use crate::root::{PackageRecord, Root, Source};
use forkd_types::{Digest, MiB};

/// The version of the record's format.
pub const SCHEMA: u32 = 1;

/// What is known of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    /// The version of this format.
    pub schema: u32,
    /// Its name.
    pub name: String,
    /// A sentence for people.
    pub description: String,
    /// The digest of the recipe it was made from.
    pub recipe: Digest,
    /// Where its files came from.
    pub source: Source,
    /// The disk, `root.ext4` beside the record.
    pub disk: FileDigest,
    /// The UUID of its file system.
    pub uuid: String,
    /// Guest memory unless somebody asks for another size.
    pub memory_mib: MiB,
    /// vCPUs unless somebody asks for another number.
    pub vcpus: u8,
    /// The environment of everything that runs in the guest.
    pub env: BTreeMap<String, String>,
    /// What to do before the parent is frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup: Option<Warmup>,
    /// The release of the kernel whose modules are in the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Every package in it.
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

    /// Reads a record; the error is the reason in words.
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

    /// The record as text.
    pub fn to_json(&self) -> String {
        format!("{:#}\n", serde_json::json!(self))
    }
}
