//! Files, watches and connections inside the guest.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Reads a file. [`crate::Event::File`] comes first, then the content on [`crate::channel::BULK`]; the
/// response is a [`ReadResult`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReadRequest {
    pub path: String,
    /// Where to begin.
    pub offset: u64,
    /// How much; to the end when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub len: Option<u64>,
}

/// How a read ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadResult {
    /// Number of bytes sent.
    pub bytes: u64,
}

/// Writes a file from [`crate::channel::IN`] up to its end; the response is a [`WriteResult`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WriteRequest {
    pub path: String,
    /// Permissions of a new file, and of an old one if given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// A name, a number, or `uid:gid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Make the file when it is missing.
    pub create: bool,
    /// Refuse when the file is there.
    pub create_new: bool,
    /// Throw the old content away.
    pub truncate: bool,
    /// Write at the end.
    pub append: bool,
    /// Where to begin; with `truncate` off.
    pub offset: u64,
    /// Write to a new file beside it and rename, so that readers see the old content or the new.
    pub atomic: bool,
    /// Make missing directories.
    pub parents: bool,
    /// On disk before the answer.
    pub sync: bool,
}

impl Default for WriteRequest {
    fn default() -> Self {
        Self {
            path: String::new(),
            mode: None,
            owner: None,
            create: true,
            create_new: false,
            truncate: true,
            append: false,
            offset: 0,
            atomic: false,
            parents: false,
            sync: false,
        }
    }
}

/// How a write ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteResult {
    /// Number of bytes written.
    pub bytes: u64,
}

/// Asks what a path is; the response is a [`FileInfo`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatRequest {
    pub path: String,
    /// Look at the link itself.
    pub no_follow: bool,
    /// Report the extended attributes whose names begin with this text, such as `user.note.`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attributes: Option<String>,
}

/// Lists a directory: [`crate::Event::Entries`], then a [`ListResult`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListRequest {
    pub path: String,
    /// How many levels; 0 and 1 are the directory itself.
    pub depth: u32,
    /// Stop after this many entries; the agent's own limit when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Report the extended attributes whose names begin with this text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attributes: Option<String>,
}

/// How a listing ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListResult {
    /// Number of entries sent.
    pub count: u64,
    /// There are more.
    pub truncated: bool,
}

/// Makes a directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MkdirRequest {
    pub path: String,
    /// Make missing parents, and be content when it is there.
    pub parents: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// A name, a number, or `uid:gid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

/// Renames a file or directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RenameRequest {
    pub from: String,
    pub to: String,
    /// Refuse when the target is there.
    pub no_replace: bool,
}

/// Removes a file or directory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RemoveRequest {
    pub path: String,
    /// With everything inside.
    pub recursive: bool,
    /// Be content when there is nothing.
    pub missing_ok: bool,
}

/// Changes permissions, owner or extended attributes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SetAttrRequest {
    /// Of which file.
    pub path: String,
    /// The new permissions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// A name, a number, or `uid:gid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The new extended attributes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attributes: Option<Attributes>,
}

/// All extended attributes of a file whose names begin with one text. Others of that beginning are removed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attributes {
    /// Begins with `user.`, and is not part of the names below.
    pub prefix: String,
    pub values: BTreeMap<String, String>,
}

/// The attributes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    pub mode: u32,
    /// ID of the owner.
    #[serde(default)]
    pub uid: u32,
    /// ID of the group.
    #[serde(default)]
    pub gid: u32,
    /// The owner's name, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The group's name, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Last change, milliseconds since the epoch.
    #[serde(default)]
    pub modified_unix_ms: i64,
    /// Where a link points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The extended attributes that were asked for, by their names without the prefix. Values that are not text, and
    /// attributes beyond the agent's limits, are left out.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, String>,
}

/// The kind of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, socket or pipe.
    #[serde(other)]
    Other,
}

/// One line of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Relative to the directory that was listed. Bytes that are not UTF-8 are replaced.
    pub path: String,
    #[serde(flatten)]
    pub info: FileInfo,
}

/// Watches a file or directory: [`crate::Event::Changes`] until the host cancels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WatchRequest {
    pub path: String,
    /// With the directories inside, those made later included.
    pub recursive: bool,
}

/// A change below a watched path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchEvent {
    pub change: WatchChange,
    /// Relative to what is watched; empty for that itself.
    pub path: String,
}

/// A change to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WatchChange {
    /// It is new.
    Created,
    /// Its content changed.
    Modified,
    /// It was closed after writing.
    Written,
    /// Permissions, owner or times changed.
    Attributes,
    /// It went away by this name.
    Removed,
    /// It came here by a rename.
    MovedIn,
    /// It left by a rename.
    MovedOut,
    /// More happened than could be kept; look for yourself.
    Overflow,
    /// A change that a newer agent made up.
    #[serde(other)]
    Unknown,
}

/// Connects to something inside: bytes from [`crate::channel::IN`] go there, what it says comes on
/// [`crate::channel::OUT`]. [`crate::Event::Connected`] comes first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DialRequest {
    /// `address:port`; a bare port is on the loopback.
    Tcp(String),
    /// The path of a Unix socket.
    Unix(String),
}
