//! Index and manifest: which blobs an image consists of.

use serde::Deserialize;

use crate::digest::Digest;
use crate::error::OciError;
use crate::limits;

/// The kinds of documents that are asked for in a registry.
pub(crate) const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json";
const INDEXES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
const MANIFESTS: [&str; 2] = [
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
];
/// The annotation that names an image in a layout.
const NAME: &str = "org.opencontainers.image.ref.name";

/// One blob, as an index or a manifest names it.
#[derive(Debug, Clone, Deserialize)]
pub struct Descriptor {
    pub digest: Digest,
    /// Bytes of the blob. Some tools leave it out in layouts; a registry must say it.
    #[serde(default)]
    pub size: Option<u64>,
    #[serde(default)]
    pub platform: Option<Platform>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

impl Descriptor {
    /// The name of the image in a layout.
    pub fn name(&self) -> Option<&str> {
        self.annotations.get(NAME).map(String::as_str)
    }
}

/// The machine that an image is for.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Platform {
    pub os: String,
    pub architecture: String,
    #[serde(default)]
    pub variant: Option<String>,
}

impl Platform {
    /// The platform of this host's guests.
    pub fn host() -> Self {
        Self {
            os: "linux".into(),
            architecture: "amd64".into(),
            variant: None,
        }
    }

    /// Whether an image for `self` runs where `wanted` is asked for. A variant that is not named fits any.
    fn fits(&self, wanted: &Self) -> bool {
        let variant = match (&self.variant, &wanted.variant) {
            (Some(ours), Some(wanted)) => ours == wanted,
            (Some(ours), None) => ours == "v1",
            (None, _) => true,
        };
        self.os == wanted.os && self.architecture == wanted.architecture && variant
    }
}

impl std::str::FromStr for Platform {
    type Err = PlatformError;

    fn from_str(text: &str) -> Result<Self, PlatformError> {
        let mut parts = text.split('/').map(str::to_owned);
        let (os, architecture, variant) = (parts.next(), parts.next(), parts.next());
        let valid = |part: &String| {
            !part.is_empty() && part.len() <= 64 && part.bytes().all(|b| b.is_ascii_alphanumeric())
        };
        match (os.filter(valid), architecture.filter(valid)) {
            (Some(os), Some(architecture))
                if parts.next().is_none() && variant.as_ref().is_none_or(valid) =>
            {
                Ok(Self {
                    os,
                    architecture,
                    variant,
                })
            }
            _ => Err(PlatformError {
                text: text.chars().take(100).collect(),
            }),
        }
    }
}

/// Text that is not a platform.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a platform of the form OS/ARCHITECTURE[/VARIANT]")]
pub struct PlatformError {
    /// The start of the text.
    pub text: String,
}

impl std::fmt::Display for Platform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(f, "/{variant}"),
            None => Ok(()),
        }
    }
}

/// A list of manifests.
#[derive(Debug, Clone, Deserialize)]
pub struct Index {
    pub manifests: Vec<Descriptor>,
}

/// The blobs of one image.
#[derive(Debug, Clone, Deserialize)]
pub struct Manifest {
    pub config: Descriptor,
    pub layers: Vec<Descriptor>,
}

/// The document behind a descriptor of an index.
#[derive(Debug, Clone)]
pub enum Document {
    Index(Index),
    Manifest(Manifest),
}

impl Document {
    /// Parses a document. Its own fields say what it is: some tools leave the media type out.
    pub fn parse(bytes: &[u8], what: &str) -> Result<Self, OciError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Head {
            #[serde(default)]
            media_type: Option<String>,
            #[serde(default)]
            manifests: Option<serde::de::IgnoredAny>,
        }
        let syntax = |source| OciError::Syntax {
            what: what.to_owned(),
            source,
        };
        let head: Head = serde_json::from_slice(bytes).map_err(syntax)?;
        let is_index = match head.media_type.as_deref() {
            Some(kind) if INDEXES.contains(&kind) => true,
            Some(kind) if MANIFESTS.contains(&kind) => false,
            Some(kind) => {
                return Err(OciError::Kind {
                    what: what.to_owned(),
                    found: kind.chars().take(100).collect(),
                });
            }
            None => head.manifests.is_some(),
        };
        if is_index {
            return Ok(Self::Index(serde_json::from_slice(bytes).map_err(syntax)?));
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(syntax)?;
        if manifest.layers.len() > limits::LAYERS {
            return Err(OciError::Limit {
                what: format!("the number of layers of {what}"),
                found: manifest.layers.len() as u64,
                limit: limits::LAYERS as u64,
            });
        }
        Ok(Self::Manifest(manifest))
    }
}

impl Index {
    /// The entry for a platform. An entry without one fits any.
    pub fn choose(&self, wanted: &Platform) -> Result<&Descriptor, OciError> {
        let fits = |entry: &&Descriptor| {
            entry
                .platform
                .as_ref()
                .is_none_or(|platform| platform.fits(wanted))
        };
        self.manifests
            .iter()
            .find(fits)
            .ok_or_else(|| OciError::NoPlatform {
                wanted: wanted.to_string(),
                there: self
                    .manifests
                    .iter()
                    .filter_map(|entry| entry.platform.as_ref().map(Platform::to_string))
                    .collect(),
            })
    }

    /// The entries of the image with this name; without a name, all entries if they are one image.
    pub fn named(&self, name: Option<&str>) -> Result<Vec<&Descriptor>, OciError> {
        let names = || -> Vec<String> {
            let mut names: Vec<_> = self.manifests.iter().filter_map(Descriptor::name).collect();
            names.sort_unstable();
            names.dedup();
            names.into_iter().map(str::to_owned).collect()
        };
        let chosen: Vec<_> = match name {
            Some(name) => self
                .manifests
                .iter()
                .filter(|entry| entry.name() == Some(name))
                .collect(),
            None if names().len() > 1 => return Err(OciError::Several { there: names() }),
            None => self.manifests.iter().collect(),
        };
        if chosen.is_empty() {
            return Err(OciError::NoName {
                name: name.unwrap_or_default().to_owned(),
                there: names(),
            });
        }
        Ok(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(platform: &str, name: &str) -> String {
        let digest = Digest::of(platform.as_bytes());
        let (os, architecture) = platform.split_once('/').unwrap();
        format!(
            r#"{{"digest":"{digest}","size":1,"platform":{{"os":"{os}","architecture":"{architecture}"}},
               "annotations":{{"org.opencontainers.image.ref.name":"{name}"}}}}"#
        )
    }

    fn index(entries: &[String]) -> Index {
        let text = format!(
            r#"{{"schemaVersion":2,"manifests":[{}]}}"#,
            entries.join(",")
        );
        match Document::parse(text.as_bytes(), "the index").unwrap() {
            Document::Index(index) => index,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_entry_for_the_platform_is_taken_and_others_are_named() {
        let index = index(&[entry("linux/arm64", "a"), entry("linux/amd64", "a")]);
        let chosen = index.choose(&Platform::host()).unwrap();
        assert_eq!(chosen.digest, Digest::of(b"linux/amd64"));
        let wanted = Platform {
            architecture: "riscv64".into(),
            ..Platform::host()
        };
        let error = index.choose(&wanted).unwrap_err().to_string();
        assert!(
            error.contains("linux/riscv64") && error.contains("linux/arm64"),
            "{error}"
        );
    }

    #[test]
    fn several_images_need_a_name() {
        let index = index(&[entry("linux/amd64", "a"), entry("linux/amd64", "b")]);
        assert!(matches!(index.named(None), Err(OciError::Several { .. })));
        assert_eq!(index.named(Some("b")).unwrap().len(), 1);
        let error = index.named(Some("c")).unwrap_err().to_string();
        assert!(error.contains("a, b"), "{error}");
    }

    #[test]
    fn a_manifest_without_a_media_type_is_read_and_an_unknown_one_refused() {
        let digest = Digest::of(b"");
        let text = format!(r#"{{"config":{{"digest":"{digest}","size":0}},"layers":[]}}"#);
        assert!(matches!(
            Document::parse(text.as_bytes(), "x"),
            Ok(Document::Manifest(_))
        ));
        let odd = text.replacen('{', r#"{"mediaType":"text/html","#, 1);
        assert!(matches!(
            Document::parse(odd.as_bytes(), "x"),
            Err(OciError::Kind { .. })
        ));
    }

    #[test]
    fn too_many_layers_are_refused() {
        let blob = format!(r#"{{"digest":"{}","size":0}}"#, Digest::of(b""));
        let layers = vec![blob.as_str(); limits::LAYERS + 1].join(",");
        let text = format!(r#"{{"config":{blob},"layers":[{layers}]}}"#);
        assert!(matches!(
            Document::parse(text.as_bytes(), "x"),
            Err(OciError::Limit { .. })
        ));
    }
}
