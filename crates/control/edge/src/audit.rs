//! Who did what: a file of JSON lines in which each line names the one before it.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// What the first line of a log names as the one before it.
const BEGIN: &str = "b3:0000000000000000000000000000000000000000000000000000000000000000";
/// The end of a log that is read to find its last line.
const TAIL: u64 = 64 * 1024;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// When, in UTC.
    pub ts: String,
    /// Who.
    pub actor: String,
    /// From where.
    pub remote: String,
    /// How.
    pub method: String,
    /// What, without the query.
    pub path: String,
    /// With what outcome.
    pub status: u16,
    /// How long it took.
    pub latency_us: u64,
    /// With which program.
    pub ua: String,
    /// Which request, as in the answer.
    pub request_id: String,
    /// Digest of the line before.
    pub prev: String,
}

/// The audit log.
#[derive(Debug)]
pub struct Audit {
    inner: Option<(PathBuf, Mutex<Inner>)>,
}

#[derive(Debug)]
struct Inner {
    file: File,
    last: String,
}

impl Audit {
    /// Opens the log for appending and finds its last line. Without a path nothing is logged.
    pub fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else {
            return Ok(Self { inner: None });
        };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("cannot create {}", parent.display()))?;
        }
        let inner =
            open(path).with_context(|| format!("cannot open the audit log {}", path.display()))?;
        Ok(Self {
            inner: Some((path.to_owned(), Mutex::new(inner))),
        })
    }

    /// Opens the file by its name again, after it was moved away. The chain goes on.
    pub fn reopen(&self) -> io::Result<()> {
        if let Some((path, inner)) = &self.inner {
            let mut inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.file = append(path)?;
        }
        Ok(())
    }

    /// Adds a line; `prev` is filled in here.
    pub fn write(&self, mut line: Line) {
        let Some((_, inner)) = &self.inner else {
            return;
        };
        let mut inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
        line.prev.clone_from(&inner.last);
        let Ok(mut text) = serde_json::to_string(&line) else {
            return;
        };
        inner.last = digest(&text);
        text.push('\n');
        if let Err(error) = inner.file.write_all(text.as_bytes()) {
            metrics::counter!("forkd_audit_errors_total").increment(1);
            tracing::error!(%error, "the audit log cannot be written");
        }
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .read(true)
        .open(path)
}

fn open(path: &Path) -> io::Result<Inner> {
    let mut file = append(path)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    (&mut file).take(TAIL).read_to_end(&mut tail)?;
    if tail.last().is_some_and(|byte| *byte != b'\n') {
        // A line that was cut off by a crash is ended, so that the next one stands alone.
        file.write_all(b"\n")?;
        tail.push(b'\n');
    }
    let text = String::from_utf8_lossy(&tail);
    let last = text
        .lines()
        .next_back()
        .map_or_else(|| BEGIN.to_owned(), digest);
    Ok(Inner { file, last })
}

fn digest(line: &str) -> String {
    format!("b3:{}", blake3::hash(line.as_bytes()).to_hex())
}

/// Checks the chain of a log's lines; gives the number of the first line that does not fit.
pub fn verify(text: &str) -> Result<usize, usize> {
    let mut previous: Option<String> = None;
    let mut count = 0;
    for (number, text) in text.lines().enumerate() {
        let line: Line = serde_json::from_str(text).map_err(|_| number + 1)?;
        if previous
            .as_ref()
            .is_some_and(|previous| *previous != line.prev)
        {
            return Err(number + 1);
        }
        previous = Some(digest(text));
        count += 1;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(path: &str) -> Line {
        Line {
            ts: "2026-01-01T00:00:00Z".into(),
            actor: "a".into(),
            remote: "unix".into(),
            method: "GET".into(),
            path: path.into(),
            status: 200,
            latency_us: 1,
            ua: "t".into(),
            request_id: "r".into(),
            prev: String::new(),
        }
    }

    #[test]
    fn the_chain_goes_on_after_a_restart_and_shows_a_missing_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        for _ in 0..2 {
            let audit = Audit::open(Some(&path)).unwrap();
            audit.write(line("/a"));
            audit.write(line("/b"));
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(verify(&text), Ok(4));
        let without: Vec<&str> = text
            .lines()
            .enumerate()
            .filter(|(n, _)| *n != 1)
            .map(|(_, l)| l)
            .collect();
        assert_eq!(verify(&without.join("\n")), Err(2));
        assert_eq!(verify(&text.replacen("\"/b\"", "\"/c\"", 1)), Err(3));
    }
}
