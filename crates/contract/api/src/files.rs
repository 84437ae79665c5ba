//! Files in a sandbox *(extension)*.
//!
//! Paths are absolute paths in the guest. `watch` streams one [`FileChange`] per change.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Kind of a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// A regular file.
    File,
    Dir,
    /// A symbolic link.
    Symlink,
    /// Any other kind, such as a device.
    Other,
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileEntry {
    /// Name of the entry, or its path if it was requested alone.
    pub name: String,
    /// Kind of the entry.
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Permission bits of the entry.
    pub mode: u32,
    /// Time of the last change, in seconds since 1970.
    pub modified_unix: i64,
    /// Name of the owner, or its number.
    #[serde(default)]
    pub owner: String,
    /// Name of the group, or its number.
    #[serde(default)]
    pub group: String,
    /// Where a symbolic link points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
}

/// Body of `POST /v1/sandboxes/{id}/files/rename`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RenameRequest {
    /// The present path.
    #[schema(max_length = 4096, pattern = "^/")]
    pub from: String,
    /// The new path.
    #[schema(max_length = 4096, pattern = "^/")]
    pub to: String,
    /// Replace a file that has the new path.
    #[serde(default)]
    pub replace: bool,
}

/// Body of `POST /v1/sandboxes/{id}/files/attributes`. Fields that are left out stay as they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttributesRequest {
    /// The file or directory.
    #[schema(max_length = 4096, pattern = "^/")]
    pub path: String,
    /// Permission bits in octal, such as `755`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[0-7]{1,4}$")]
    pub mode: Option<String>,
    /// A user name, a number, or `uid:gid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

/// Response to `PUT /v1/sandboxes/{id}/files`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WriteResult {
    /// Path of the written file.
    pub path: String,
    /// Number of bytes written.
    pub bytes: u64,
}

/// Body of `POST /v1/sandboxes/{id}/files/mkdir`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MakeDirRequest {
    /// The directory; missing parents are created.
    #[schema(max_length = 4096, pattern = "^/")]
    pub path: String,
}

/// Kind of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileChangeKind {
    /// The file is new.
    Created,
    /// The content changed.
    Modified,
    /// The file was closed after writing.
    Written,
    /// Permissions, owner or times changed.
    Attributes,
    /// The file was removed.
    Removed,
    /// A rename moved the file here.
    MovedIn,
    /// A rename moved the file away.
    MovedOut,
    /// Changes were lost; list the directory again.
    Overflow,
}

/// One line (NDJSON) or one event (SSE) of `GET /v1/sandboxes/{id}/files/watch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileChange {
    /// Kind of the change.
    pub change: FileChangeKind,
    /// Path relative to the watched one; empty for the watched path itself.
    pub path: String,
}
