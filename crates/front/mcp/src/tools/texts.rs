//! Tools that work on the text of a file: replace a part of it, wait for a part of it.

use std::time::Duration;

use forkd_api::ErrorCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::files::{MAX_FILE, Written, read, write};
use crate::call::Call;
use crate::refusal::Refusal;
use crate::tool::{Effect, Set, Tool};

/// The end of a file in which a marker is searched, in bytes.
const WINDOW: u64 = 4096;
/// The longest excerpt in the answer, in characters.
const EXCERPT: usize = 256;
/// The longest wait for a marker, in seconds.
const MAX_WAIT: u64 = 3600;

/// Arguments of the tool `edit_file`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EditInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Absolute path of a text file in the sandbox.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
    /// Text to replace, exactly as it is in the file.
    #[schemars(length(min = 1))]
    old: String,
    /// Text to put there.
    new: String,
    /// Replace every occurrence; otherwise the text must occur exactly once.
    #[serde(default)]
    all: bool,
}

/// A file that was edited.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Edited {
    /// Path of the file.
    path: String,
    /// Number of replacements in the file.
    replacements: usize,
    /// Size of the file now, in bytes.
    bytes: u64,
}

/// Replaces one or all occurrences.
fn replace(text: &str, input: &EditInput) -> Result<(String, usize), Refusal> {
    let count = text.matches(&input.old).count();
    match count {
        _ if input.old.is_empty() => Err(Refusal::invalid("old is empty")),
        0 => Err(Refusal::invalid("the file does not contain the old text")
            .with_hint("read the file again; white space and line ends must match")),
        1 => Ok((text.replacen(&input.old, &input.new, 1), 1)),
        _ if input.all => Ok((text.replace(&input.old, &input.new), count)),
        _ => Err(
            Refusal::invalid(format!("the old text occurs {count} times"))
                .with_hint("add lines around it until it is unique, or set all"),
        ),
    }
}

/// Implements the tool `edit_file`.
pub struct EditFile;

impl Tool for EditFile {
    const NAME: &'static str = "edit_file";
    const TITLE: &'static str = "Edit a file";
    const ABOUT: &'static str =
        "Replace a piece of text in a file of a sandbox. The old text must match exactly.";
    const SET: Set = Set::Core;
    const EFFECT: Effect = Effect::Runs;
    type Input = EditInput;
    type Output = Edited;

    async fn run(call: &Call<'_>, input: EditInput) -> Result<Edited, Refusal> {
        let (id, path) = (&input.sandbox_id, &input.path);
        let (bytes, more) = read(call, id, path, 0, MAX_FILE).await?;
        if more {
            return Err(
                Refusal::new(ErrorCode::TooLarge, "a tool edits files of at most 1 MiB")
                    .with_hint("use sed or another program in the sandbox"),
            );
        }
        let text =
            String::from_utf8(bytes).map_err(|_| Refusal::invalid("the file is not UTF-8 text"))?;
        let (text, replacements) = replace(&text, &input)?;
        if text.len() > 2 * MAX_FILE {
            return Err(Refusal::new(
                ErrorCode::TooLarge,
                "the edited file would be too large",
            ));
        }
        let mode = call.client.stat_file(id, path).await?.mode & 0o7777;
        let Written { path, bytes } = write(call, id, path, Some(mode), text.into_bytes()).await?;
        Ok(Edited {
            path,
            replacements,
            bytes,
        })
    }
}

/// Arguments of the tool `wait_for_text`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WaitInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Absolute path of a file in the sandbox, such as a log; it need not exist yet.
    #[schemars(length(min = 1, max = 4096))]
    path: String,
    /// Text to wait for in the last 4096 bytes of the file.
    #[schemars(length(min = 1, max = 4096))]
    marker: String,
    /// Seconds to wait for the text.
    #[serde(default = "sixty")]
    #[schemars(range(min = 0, max = 3600))]
    timeout_secs: u64,
    /// Milliseconds between two looks at the file.
    #[serde(default = "two_hundred")]
    #[schemars(range(min = 50, max = 60000))]
    poll_interval_ms: u64,
}

fn sixty() -> u64 {
    60
}

fn two_hundred() -> u64 {
    200
}

/// Whether the text came.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Waited {
    /// Whether the text is there.
    found: bool,
    /// Milliseconds until it was found, or until the time was over.
    elapsed_ms: u64,
    /// The end of the file.
    last_excerpt: String,
}

/// The last bytes of a file; nothing if it does not exist yet.
async fn tail(call: &Call<'_>, id: &str, path: &str) -> Result<String, Refusal> {
    let size = match call.client.stat_file(id, path).await {
        Ok(entry) => entry.size,
        Err(error) if error.code() == Some(ErrorCode::FileNotFound) => return Ok(String::new()),
        Err(error) => return Err(error.into()),
    };
    let from = size.saturating_sub(WINDOW);
    // The file may grow meanwhile: twice the window is enough to see all of it at the next look.
    let (bytes, _) = read(call, id, path, from, 2 * WINDOW as usize).await?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Implements the tool `wait_for_text`.
pub struct WaitForText;

impl Tool for WaitForText {
    const NAME: &'static str = "wait_for_text";
    const TITLE: &'static str = "Wait for a text in a file";
    const ABOUT: &'static str = "Wait until a text appears at the end of a file in a sandbox, for example until a \
        server has written that it is ready.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Reads;
    type Input = WaitInput;
    type Output = Waited;

    async fn run(call: &Call<'_>, input: WaitInput) -> Result<Waited, Refusal> {
        if input.timeout_secs > MAX_WAIT || input.marker.is_empty() {
            return Err(Refusal::invalid(format!(
                "timeout_secs is 0 to {MAX_WAIT}, and marker is not empty"
            )));
        }
        let begin = Instant::now();
        let end = begin + Duration::from_secs(input.timeout_secs);
        let pause = Duration::from_millis(input.poll_interval_ms.clamp(50, 60_000));
        loop {
            let text = tail(call, &input.sandbox_id, &input.path).await?;
            let found = text.contains(&input.marker);
            if found || Instant::now() >= end {
                let skipped = text.chars().count().saturating_sub(EXCERPT);
                return Ok(Waited {
                    found,
                    elapsed_ms: begin.elapsed().as_millis().try_into().unwrap_or(u64::MAX),
                    last_excerpt: text.chars().skip(skipped).collect(),
                });
            }
            call.note(&text);
            tokio::time::sleep_until(end.min(Instant::now() + pause)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edit(text: &str, old: &str, all: bool) -> Result<(String, usize), Refusal> {
        let input = EditInput {
            sandbox_id: String::new(),
            path: String::new(),
            old: old.to_owned(),
            new: "x".to_owned(),
            all,
        };
        replace(text, &input)
    }

    #[test]
    fn a_text_that_is_not_unique_is_not_replaced_by_accident() {
        assert_eq!(edit("a b", "a", false).unwrap(), ("x b".to_owned(), 1));
        assert_eq!(edit("a a", "a", true).unwrap(), ("x x".to_owned(), 2));
        assert!(
            edit("a a", "a", false)
                .unwrap_err()
                .error
                .contains("2 times")
        );
        assert!(edit("a", "b", true).is_err() && edit("a", "", true).is_err());
    }
}
