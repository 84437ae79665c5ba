//! `kernel.json`: content and origin of a kernel folder.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::digest::FileDigest;

/// The version of the record's format.
pub const SCHEMA: u32 = 1;

/// Content and origin of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelRecord {
    /// The version of this format.
    pub schema: u32,
    /// The release, as `uname -r` prints it.
    pub version: String,
    /// Origin of the kernel.
    pub source: KernelSource,
    /// Entry point of a PVH boot; absent if the kernel does not support PVH.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pvh_entry: Option<u64>,
    /// How the bzImage was compressed; absent for an ELF kernel.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub compression: Option<String>,
    /// `vmlinux` and, where they exist, `vmlinuz` and `config`.
    pub files: BTreeMap<String, FileDigest>,
    /// Every module, by name.
    pub modules: Vec<ModuleRecord>,
}

/// Origin of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum KernelSource {
    /// A package of Debian.
    Debian {
        /// The release of Debian.
        suite: String,
        /// The package.
        package: String,
        version: String,
        /// Digest in Debian's signed index.
        sha256: String,
    },
    /// A file of the user.
    Own { path: PathBuf },
}

/// One module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleRecord {
    /// Name of the module, with underscores.
    pub name: String,
    /// Path below `modules/`.
    pub path: PathBuf,
    /// The file as it is stored, usually compressed.
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

    /// Everything that makes two kernels the same, wherever they came from.
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
