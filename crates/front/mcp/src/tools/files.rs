//! Tools that read, write and list files in a sandbox.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use forkd_api::{FileEntry, FileKind};
use futures::{StreamExt, pin_mut, stream};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::call::Call;
use crate::clip;
use crate::refusal::Refusal;
use crate::tool::{Effect, Set, Tool};

/// The largest file that a tool writes or edits, in bytes.
pub const MAX_FILE: usize = 1 << 20;
/// The most entries of a directory in one answer.
const MAX_ENTRIES: usize = 1000;

/// Reads at most `limit` bytes of a file. The flag is true if the file has more.
pub async fn read(
    call: &Call<'_>,
    id: &str,
    path: &str,
    offset: u64,
    limit: usize,
) -> Result<(Vec<u8>, bool), Refusal> {
    let content = call.client.read_file_from(id, path, offset).await?;
    pin_mut!(content);
    let mut bytes = Vec::new();
    while let Some(chunk) = content.next().await {
        bytes.extend_from_slice(&chunk?);
        if bytes.len() > limit {
            bytes.truncate(limit);
            return Ok((bytes, true));
        }
    }
    Ok((bytes, false))
}

/// Writes a file, whole or not at all.
pub async fn write(
    call: &Call<'_>,
    id: &str,
    path: &str,
    mode: Option<u32>,
    content: Vec<u8>,
) -> Result<Written, Refusal> {
    let content = stream::iter([Ok::<_, std::io::Error>(Bytes::from(content))]);
    let done = call.client.write_file(id, path, mode, content).await?;
    Ok(Written {
        path: done.path,
        bytes: done.bytes,
    })
}

/// Arguments of the tool `read_file`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Absolute path in the sandbox.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
    /// Position of the first byte to read.
    #[serde(default)]
    offset: u64,
    /// Most bytes to read.
    #[serde(default = "whole")]
    #[schemars(range(min = 1, max = 32768))]
    limit: usize,
}

fn whole() -> usize {
    clip::LIMIT
}

/// Content of a file.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Content {
    /// The text, if it is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// The bytes in base64, if they are not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
    /// Number of bytes in this answer.
    bytes: usize,
    /// Whether the file has more; read on with offset = next_offset.
    truncated: bool,
    /// Position behind the last byte of this answer.
    next_offset: u64,
}

/// Cuts a character in half at the end off, so that the next answer begins with it.
fn whole_characters(bytes: &mut Vec<u8>) {
    if let Err(error) = std::str::from_utf8(bytes)
        && error.error_len().is_none()
        && error.valid_up_to() > 0
    {
        bytes.truncate(error.valid_up_to());
    }
}

/// Implements the tool `read_file`.
pub struct ReadFile;

impl Tool for ReadFile {
    const NAME: &'static str = "read_file";
    const TITLE: &'static str = "Read a file";
    const ABOUT: &'static str = "Read a file of a sandbox, at most 32 KiB at once. Read on with offset if truncated is true.";
    const SET: Set = Set::Core;
    const EFFECT: Effect = Effect::Reads;
    type Input = ReadInput;
    type Output = Content;

    async fn run(call: &Call<'_>, input: ReadInput) -> Result<Content, Refusal> {
        let limit = input.limit.clamp(1, clip::LIMIT);
        let (mut bytes, truncated) =
            read(call, &input.sandbox_id, &input.path, input.offset, limit).await?;
        if truncated {
            whole_characters(&mut bytes);
        }
        let len = bytes.len();
        let (text, base64) = match String::from_utf8(bytes) {
            Ok(text) => (Some(text), None),
            Err(error) => (None, Some(STANDARD.encode(error.as_bytes()))),
        };
        Ok(Content {
            text,
            base64,
            bytes: len,
            truncated,
            next_offset: input.offset.saturating_add(len as u64),
        })
    }
}

/// Arguments of the tool `write_file`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Absolute path in the sandbox; missing directories are made.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
    /// The new content as text, at most 1 MiB.
    #[serde(default)]
    text: Option<String>,
    /// The new content in base64, instead of text.
    #[serde(default)]
    base64: Option<String>,
    /// Permission bits in octal, such as 755.
    #[serde(default)]
    mode: Option<String>,
}

/// A file that was written.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Written {
    /// Path of the file.
    pub path: String,
    /// Number of bytes written.
    pub bytes: u64,
}

/// Implements the tool `write_file`.
pub struct WriteFile;

impl Tool for WriteFile {
    const NAME: &'static str = "write_file";
    const TITLE: &'static str = "Write a file";
    const ABOUT: &'static str =
        "Write a file in a sandbox, whole or not at all. An existing file is replaced.";
    const SET: Set = Set::Core;
    const EFFECT: Effect = Effect::Replaces;
    type Input = WriteInput;
    type Output = Written;

    async fn run(call: &Call<'_>, input: WriteInput) -> Result<Written, Refusal> {
        let content = match (input.text, input.base64) {
            (Some(text), None) => text.into_bytes(),
            (None, Some(base64)) => STANDARD
                .decode(base64)
                .map_err(|_| Refusal::invalid("base64 is not valid base64"))?,
            _ => return Err(Refusal::invalid("exactly one of text and base64 is needed")),
        };
        if content.len() > MAX_FILE {
            return Err(Refusal::new(
                forkd_api::ErrorCode::TooLarge,
                "a tool writes at most 1 MiB",
            )
            .with_hint("let a command in the sandbox produce the file"));
        }
        let mode = input.mode.map(|mode| {
            let parsed = u32::from_str_radix(&mode, 8).ok();
            parsed
                .filter(|mode| *mode <= 0o7777)
                .ok_or_else(|| Refusal::invalid("mode is octal, such as 644 or 755"))
        });
        let mode = mode.transpose()?;
        write(call, &input.sandbox_id, &input.path, mode, content).await
    }
}

/// Arguments of the tool `list_files`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ListInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Absolute path of a directory in the sandbox.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
}

/// An entry of a directory.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Entry {
    /// Name of the entry.
    name: String,
    /// `file`, `dir`, `symlink` or `other`.
    kind: &'static str,
    /// Size of the entry in bytes.
    size: u64,
    /// Permission bits in octal.
    mode: String,
    /// Time of the last change, in seconds since 1970.
    modified_unix: i64,
    /// Where a symbolic link points.
    #[serde(skip_serializing_if = "Option::is_none")]
    symlink_target: Option<String>,
}

impl From<FileEntry> for Entry {
    fn from(entry: FileEntry) -> Self {
        Self {
            name: entry.name,
            kind: match entry.kind {
                FileKind::File => "file",
                FileKind::Dir => "dir",
                FileKind::Symlink => "symlink",
                FileKind::Other => "other",
            },
            size: entry.size,
            mode: format!("{:o}", entry.mode & 0o7777),
            modified_unix: entry.modified_unix,
            symlink_target: entry.symlink_target,
        }
    }
}

/// The entries of a directory.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Entries {
    /// At most 1000 entries.
    entries: Vec<Entry>,
    /// Whether the directory has more.
    truncated: bool,
}

/// Implements the tool `list_files`.
pub struct ListFiles;

impl Tool for ListFiles {
    const NAME: &'static str = "list_files";
    const TITLE: &'static str = "List a directory";
    const ABOUT: &'static str = "List the entries of a directory in a sandbox.";
    const SET: Set = Set::Core;
    const EFFECT: Effect = Effect::Reads;
    type Input = ListInput;
    type Output = Entries;

    async fn run(call: &Call<'_>, input: ListInput) -> Result<Entries, Refusal> {
        let found = call
            .client
            .list_files(&input.sandbox_id, &input.path)
            .await?;
        Ok(Entries {
            truncated: found.len() > MAX_ENTRIES,
            entries: found
                .into_iter()
                .take(MAX_ENTRIES)
                .map(Into::into)
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_with_a_whole_character() {
        let mut bytes = "aé".as_bytes()[..2].to_vec();
        whole_characters(&mut bytes);
        assert_eq!(bytes, b"a");
        for whole in [&b"ab"[..], &b"\xff\xfe"[..], &b"\xc3"[..]] {
            let mut bytes = whole.to_vec();
            whole_characters(&mut bytes);
            assert_eq!(bytes, whole);
        }
    }
}
