//! `kernel.json`: content and origin of a kernel folder.
//!
//! `schema` is the version of the format; other versions are refused. Two kernels with equal
//! `KernelRecord::content` are the same kernel.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::digest::FileDigest;

pub const SCHEMA: u32 = 1;

/// Content of `kernel.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelRecord {
    pub schema: u32,
    /// The release, as `uname -r` prints it.
    pub version: String,
    pub source: KernelSource,
    /// Entry point of a PVH boot. `None` if the kernel does not support it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pvh_entry: Option<u64>,
    /// Compression of the bzImage. `None` for an ELF kernel.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub compression: Option<String>,
    /// `vmlinux` and, where they exist, `vmlinuz` and `config`.
    pub files: BTreeMap<String, FileDigest>,
    pub modules: Vec<ModuleRecord>,
}

/// The origin of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum KernelSource {
    Debian {
        suite: String,
        package: String,
        version: String,
        /// SHA-256 of the package, from Debian's signed index.
        sha256: String,
    },
    /// A file of the user.
    Own { path: PathBuf },
}

/// One module of the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleRecord {
    /// With underscores instead of dashes.
    pub name: String,
    /// Relative to `modules/`.
    pub path: PathBuf,
    /// The file as stored, usually compressed.
    #[serde(flatten)]
    pub file: FileDigest,
}

impl KernelRecord {
    pub(super) fn new(version: String, source: KernelSource) -> Self {
        Self {
            schema: SCHEMA,
            version,
            source,
            pvh_entry: None,
            compression: None,
            files: BTreeMap::new(),
            modules: Vec::new(),
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

    /// The fields that identify a kernel, without its origin.
    pub(super) fn content(&self) -> String {
        serde_json::json!([self.version, self.files, self.modules]).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_and_other_versions_are_refused() {
        let mut record = KernelRecord::new(
            "6.12.1".into(),
            KernelSource::Own {
                path: "/boot/vmlinux".into(),
            },
        );
        let file = FileDigest {
            size: 3,
            digest: crate::digest::of_bytes(b"abc"),
        };
        record.files.insert("vmlinux".into(), file.clone());
        record.modules.push(ModuleRecord {
            name: "virtio_blk".into(),
            path: "kernel/virtio_blk.ko.xz".into(),
            file,
        });
        let text = record.to_json();
        assert_eq!(KernelRecord::parse(text.as_bytes()), Ok(record));
        let newer = text.replace("\"schema\": 1", "\"schema\": 7");
        assert!(
            KernelRecord::parse(newer.as_bytes())
                .unwrap_err()
                .contains("version 7")
        );
    }
}
