//! The manifest of an artifact and the index of a layout, as OCI defines them.
//!
//! A manifest names every blob that the artifact needs, packs of earlier versions included. A registry that removes
//! blobs without a manifest therefore never removes a pack that is in use.

use std::collections::BTreeMap;

use forkd_oci::digest::Digest;
use serde::{Deserialize, Serialize};

use crate::error::HubError;
use crate::limits;

pub const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
pub const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
pub const SNAPSHOT_TYPE: &str = "application/vnd.forkd.snapshot.v1";
pub const CONFIG_TYPE: &str = "application/vnd.forkd.snapshot.config.v1+json";
pub const PAGES_TYPE: &str = "application/vnd.forkd.index.v1+zstd";
pub const HASHES_TYPE: &str = "application/vnd.forkd.hashes.v1";
pub const PACK_TYPE: &str = "application/vnd.forkd.pack.v1";
pub const SIGNATURE_TYPE: &str = "application/vnd.forkd.signature.v1";
pub const SSHSIG_TYPE: &str = "application/vnd.forkd.sshsig.v1";
pub const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
/// The content of an empty configuration.
pub const EMPTY: &[u8] = b"{}";

/// Annotation of a pack: whether disks or memory need it.
pub const ROLE: &str = "dev.forkd.role";
/// Annotation of an entry in a layout: its name.
pub const REF_NAME: &str = "org.opencontainers.image.ref.name";
const TITLE: &str = "org.opencontainers.image.title";

/// The parts of a machine that a pack was written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Disk,
    Memory,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Memory => "memory",
        }
    }
}

/// A blob by its digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    #[serde(default)]
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// Describes bytes by their digest and length.
    pub fn of(media_type: &str, bytes: &[u8]) -> Self {
        Self::new(media_type, Digest::of(bytes), bytes.len() as u64)
    }

    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        Self {
            media_type: media_type.to_owned(),
            digest,
            size,
            artifact_type: None,
            annotations: BTreeMap::new(),
        }
    }

    fn is(&self, media_type: &str) -> bool {
        self.media_type == media_type
    }
}

/// A manifest as it is written and read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    pub schema_version: u32,
    #[serde(default)]
    pub media_type: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
    /// The manifest that this one refers to: a signature has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// The index of a layout, or a list of referrers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    pub schema_version: u32,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub media_type: String,
    pub manifests: Vec<Descriptor>,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            schema_version: 2,
            media_type: INDEX_TYPE.into(),
            manifests: Vec::new(),
        }
    }
}

/// A checked manifest of a snapshot: every blob in its place.
#[derive(Debug, Clone)]
pub struct Artifact {
    /// The manifest, byte by byte.
    pub bytes: Vec<u8>,
    pub digest: Digest,
    pub config: Descriptor,
    pub index: Descriptor,
    /// Hashes of the stored pages; an artifact may leave them out.
    pub hashes: Option<Descriptor>,
    /// The packs in the order of the index.
    pub packs: Vec<Descriptor>,
}

impl Artifact {
    /// Writes a manifest for these blobs.
    pub fn new(
        name: &str,
        config: Descriptor,
        index: Descriptor,
        hashes: Option<Descriptor>,
        packs: Vec<Descriptor>,
    ) -> Self {
        let mut layers = vec![index.clone()];
        layers.extend(hashes.clone());
        layers.extend(packs.iter().cloned());
        let manifest = Manifest {
            schema_version: 2,
            media_type: MANIFEST_TYPE.into(),
            artifact_type: Some(SNAPSHOT_TYPE.into()),
            config: config.clone(),
            layers,
            subject: None,
            annotations: [(TITLE.to_owned(), name.to_owned())].into(),
        };
        let bytes = to_bytes(&manifest);
        Self {
            digest: Digest::of(&bytes),
            bytes,
            config,
            index,
            hashes,
            packs,
        }
    }

    /// Parses a manifest and finds each blob that a snapshot has.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, HubError> {
        let manifest: Manifest = parse(&bytes, "the manifest")?;
        let kind = manifest.artifact_type.as_deref().unwrap_or_default();
        if kind != SNAPSHOT_TYPE || !manifest.config.is(CONFIG_TYPE) {
            return Err(other_kind(kind, &manifest.config.media_type));
        }
        let only = |media_type: &str| {
            let mut found = manifest.layers.iter().filter(|layer| layer.is(media_type));
            let first = found.next();
            match found.next() {
                Some(_) => Err(HubError::invalid(format!("{media_type} is there twice"))),
                None => Ok(first.cloned()),
            }
        };
        let index = only(PAGES_TYPE)?.ok_or_else(|| HubError::invalid("it has no page index"))?;
        let hashes = only(HASHES_TYPE)?;
        let packs: Vec<_> = manifest
            .layers
            .iter()
            .filter(|layer| layer.is(PACK_TYPE))
            .cloned()
            .collect();
        let known = packs.len() + 1 + usize::from(hashes.is_some());
        if known != manifest.layers.len() {
            return Err(HubError::Version {
                what: "a blob of an unknown kind among its",
                found: "layers".into(),
                known: SNAPSHOT_TYPE.into(),
            });
        }
        bounded("packs", packs.len() as u64, limits::PACKS as u64)?;
        bounded(
            "bytes of configuration",
            manifest.config.size,
            limits::CONFIG,
        )?;
        bounded("bytes of page index", index.size, limits::INDEX)?;
        for pack in &packs {
            bounded("bytes in a pack", pack.size, limits::PACK)?;
        }
        Ok(Self {
            digest: Digest::of(&bytes),
            bytes,
            config: manifest.config,
            index,
            hashes,
            packs,
        })
    }

    pub fn descriptor(&self) -> Descriptor {
        let mut descriptor = Descriptor::new(MANIFEST_TYPE, self.digest, self.bytes.len() as u64);
        descriptor.artifact_type = Some(SNAPSHOT_TYPE.into());
        descriptor
    }

    /// Every blob but the manifest, documents first.
    pub fn blobs(&self) -> impl Iterator<Item = &Descriptor> {
        [&self.config, &self.index]
            .into_iter()
            .chain(&self.hashes)
            .chain(&self.packs)
    }
}

fn other_kind(kind: &str, config: &str) -> HubError {
    if config.contains("image.config") || config.contains("docker.container.image") {
        return HubError::ContainerImage {
            place: "the manifest".into(),
        };
    }
    let shown = if kind.is_empty() { config } else { kind };
    HubError::Version {
        what: "the kind",
        found: shown.chars().take(100).collect(),
        known: SNAPSHOT_TYPE.into(),
    }
}

/// Refuses a count that exceeds its limit.
pub(crate) fn bounded(what: &str, found: u64, limit: u64) -> Result<(), HubError> {
    if found > limit {
        return Err(HubError::invalid(format!(
            "it has {found} {what}, and at most {limit} are allowed"
        )));
    }
    Ok(())
}

pub(crate) fn parse<T: for<'de> Deserialize<'de>>(
    bytes: &[u8],
    what: &'static str,
) -> Result<T, HubError> {
    serde_json::from_slice(bytes).map_err(|source| HubError::Syntax { what, source })
}

/// A document as JSON. Serialisation of these types cannot fail.
pub fn to_bytes(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

/// Compares bytes with the digest that names them.
pub fn checked(what: &str, bytes: &[u8], expected: Digest) -> Result<(), HubError> {
    let found = Digest::of(bytes);
    if found == expected {
        return Ok(());
    }
    Err(HubError::Digest {
        what: what.to_owned(),
        expected: expected.to_string(),
        found: found.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact() -> Artifact {
        let blob = |kind: &str, text: &str| Descriptor::of(kind, text.as_bytes());
        Artifact::new(
            "py",
            blob(CONFIG_TYPE, "config"),
            blob(PAGES_TYPE, "index"),
            Some(blob(HASHES_TYPE, "hashes")),
            vec![blob(PACK_TYPE, "a"), blob(PACK_TYPE, "b")],
        )
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written() {
        let artifact = artifact();
        let read = Artifact::parse(artifact.bytes.clone()).unwrap();
        assert_eq!(read.digest, artifact.digest);
        assert_eq!(read.packs, artifact.packs);
        assert_eq!(read.blobs().count(), 5);
    }

    #[test]
    fn other_manifests_are_refused_by_kind() {
        let text = String::from_utf8(artifact().bytes).unwrap();
        let image = text
            .replace(CONFIG_TYPE, "application/vnd.oci.image.config.v1+json")
            .replace(SNAPSHOT_TYPE, "x");
        let error = Artifact::parse(image.into_bytes()).unwrap_err();
        assert!(matches!(error, HubError::ContainerImage { .. }), "{error}");
        let newer = text.replace("snapshot.v1", "snapshot.v2");
        let error = Artifact::parse(newer.into_bytes()).unwrap_err();
        assert!(matches!(error, HubError::Version { .. }), "{error}");
        let odd = text.replacen(PACK_TYPE, "text/plain", 1);
        assert!(Artifact::parse(odd.into_bytes()).is_err());
        let huge = text.replacen("\"size\":1", "\"size\":99999999999", 1);
        assert!(Artifact::parse(huge.into_bytes()).is_err());
        assert!(Artifact::parse(b"{}".to_vec()).is_err());
    }
}
