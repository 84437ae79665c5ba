//! Trees of files as tar streams, and mounts: what builds of images need.

use serde::{Deserialize, Serialize};

/// Packs files into a tar stream on [`crate::channel::BULK`]; the response is an [`ArchiveResult`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PackRequest {
    pub items: Vec<PackItem>,
    /// Leave out what lies on other file systems than the item itself. The folders that they are mounted on stay.
    pub one_file_system: bool,
    /// Absolute paths that are left out with everything below them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
}

/// A file or folder, and its name in the archive.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PackItem {
    /// An absolute path. A link is followed.
    pub from: String,
    /// A relative path. The content of a folder gets its names below it; empty is the root of the archive.
    pub to: String,
}

/// Unpacks a tar stream from [`crate::channel::IN`], plain or gzip; the response is an [`ArchiveResult`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UnpackRequest {
    /// The folder; it is made if it is missing.
    pub path: String,
    /// Owner of everything that is unpacked: a name, a number, or `uid:gid`. Without one, the numbers of the archive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Permissions of everything that is unpacked. Without them, those of the archive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
}

/// How packing or unpacking ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveResult {
    pub entries: u64,
    /// Bytes of the files.
    pub bytes: u64,
}

/// Mounts something on a path, which is made if it is missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRequest {
    pub what: MountSource,
    /// An absolute path.
    pub target: String,
    #[serde(default)]
    pub read_only: bool,
}

/// The source of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountSource {
    /// A file or folder of the guest.
    Bind(String),
    /// Memory, at most this much of it.
    Tmpfs {
        #[serde(default)]
        size_mib: Option<u64>,
    },
}

/// How a mount was made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountResult {
    /// The first path that had to be made for the target.
    #[serde(default)]
    pub made: Option<String>,
}

/// Ends a mount.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UnmountRequest {
    pub target: String,
    /// A path to remove afterwards, as [`MountResult`] named it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remove: Option<String>,
}
