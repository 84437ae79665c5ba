//! Files in a sandbox *(extension)*.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a directory entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// Anything else.
    Other,
}

/// One entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileEntry {
    /// Its name, or its path when asked for alone.
    pub name: String,
    /// What it is.
    pub kind: FileKind,
    /// Its size in bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Last change, in seconds since 1970.
    pub modified_unix: i64,
}

/// Answer of `PUT /v1/sandboxes/{id}/files`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WriteResult {
    /// Where the bytes went.
    pub path: String,
    /// How many there were.
    pub bytes: u64,
}

/// Body of `POST /v1/sandboxes/{id}/files/mkdir`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MakeDirRequest {
    /// The directory; missing parents are made too.
    #[schema(max_length = 4096, pattern = "^/")]
    pub path: String,
}

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileChangeKind {
    /// It is new.
    Created,
    /// Its content changed.
    Modified,
    /// It was closed after writing.
    Written,
    /// Permissions, owner or times changed.
    Attributes,
    /// It went away.
    Removed,
    /// It came here by a rename.
    MovedIn,
    /// It left by a rename.
    MovedOut,
    /// More happened than could be kept; look for yourself.
    Overflow,
}

/// One line (NDJSON) or one event (SSE) of `GET /v1/sandboxes/{id}/files/watch`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileChange {
    /// What happened.
    pub change: FileChangeKind,
    /// Relative to what is watched; empty for that itself.
    pub path: String,
}
