//! The audit log: a file of JSON lines, one per request, each with the digest of the line before.
//!
//! - Lines are bounded: [`Line`]s are cut to [`MAX_TEXT`] characters a field. The chain does not depend on that: the last
//!   line is found whatever its length.
//! - Files are bounded: at [`Limits::max_bytes`] the log becomes `<name>.1`, `<name>.1` becomes `<name>.2`, and so on up to
//!   [`Limits::keep`]. Every new file begins with a line that names the last line of the file before, so the chain goes on
//!   through rotations and restarts.
//! - Refused requests cost no token, so each peer has [`REFUSALS`] lines per [`WINDOW`]. Further ones are counted, and the
//!   count is written as one line when the window is over.
//! - A line that could not be written does not advance the chain: the next line names the last one that is in the file.
//!
//! The digests are not keyed. They show lost lines, edits and reordering, unless the rest of the file was written anew:
//! root and the daemon's user can do that. To detect it, compare with an anchor kept elsewhere: the daemon writes
//! the digest of the last line ([`Audit::head`]) to its own log at every rotation, every hour and at the stop.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

/// The digest that the first line of a log names as the one before it.
const BEGIN: &str = "b3:0000000000000000000000000000000000000000000000000000000000000000";
/// How much is read at a time to find the last line.
const CHUNK: u64 = 64 * 1024;
/// The most characters of one field.
pub const MAX_TEXT: usize = 512;
/// Lines about refused requests that each peer has in a window.
const REFUSALS: u64 = 10;
/// How long refusals of one peer are counted together.
const WINDOW: Duration = Duration::from_secs(60);
/// Peers that are counted apart; all others share one count.
const MAX_PEERS: usize = 1024;

/// One request, or a number of refused ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// When, in UTC.
    pub ts: String,
    /// The name of the token, or of the local user.
    pub actor: String,
    /// The address of the client.
    pub remote: String,
    pub method: String,
    /// Without the query.
    pub path: String,
    pub status: u16,
    pub latency_us: u64,
    /// The `User-Agent` header.
    pub ua: String,
    /// As in the header `x-request-id` of the response.
    pub request_id: String,
    /// Refused requests that this line stands for; a line without it is one request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<u64>,
    /// Digest of the line before.
    pub prev: String,
}

impl Line {
    fn cut(&mut self) {
        for field in [
            &mut self.actor,
            &mut self.remote,
            &mut self.method,
            &mut self.path,
            &mut self.ua,
            &mut self.request_id,
        ] {
            if let Some((at, _)) = field.char_indices().nth(MAX_TEXT) {
                field.truncate(at);
            }
        }
    }
}

/// Limits on the files of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The size at which the log is rotated.
    pub max_bytes: u64,
    /// Rotated files that are kept.
    pub keep: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_bytes: 64 << 20,
            keep: 4,
        }
    }
}

/// The audit log.
#[derive(Debug)]
pub struct Audit {
    log: Option<Mutex<Log>>,
    refusals: Mutex<HashMap<String, Refusals>>,
}

/// Refused requests of one peer in the current window.
#[derive(Debug)]
struct Refusals {
    since: Instant,
    written: u64,
    counted: u64,
}

impl Audit {
    /// Opens the log for appending and finds its last line. Without a path nothing is logged.
    pub fn open(path: Option<&Path>, limits: Limits) -> anyhow::Result<Self> {
        let log = match path {
            None => None,
            Some(path) => {
                if let Some(parent) = path.parent() {
                    std::fs::create_dir_all(parent)
                        .with_context(|| format!("cannot create {}", parent.display()))?;
                }
                let log = Log::open(path, limits)
                    .with_context(|| format!("cannot open the audit log {}", path.display()))?;
                Some(Mutex::new(log))
            }
        };
        Ok(Self {
            log,
            refusals: Mutex::default(),
        })
    }

    fn log(&self) -> Option<MutexGuard<'_, Log>> {
        let log = self.log.as_ref()?;
        Some(log.lock())
    }

    /// Opens the file by its name again, after it was moved away. The chain goes on.
    pub fn reopen(&self) -> io::Result<()> {
        match self.log() {
            Some(mut log) => log.reopen(),
            None => Ok(()),
        }
    }

    /// The digest of the last line, to be kept elsewhere as an anchor.
    pub fn head(&self) -> Option<String> {
        self.log().map(|log| log.last.clone())
    }

    /// Adds a line; `prev` is filled in here.
    pub fn write(&self, line: Line) {
        if let Some(mut log) = self.log() {
            log.add(line);
        }
    }

    /// Adds a line about a refused request, or counts it if its peer has had its share of lines.
    pub fn write_refused(&self, peer: &str, line: Line) {
        self.write_refused_at(peer, line, Instant::now());
    }

    fn write_refused_at(&self, peer: &str, line: Line, now: Instant) {
        if self.log.is_none() {
            return;
        }
        self.sweep_at(now);
        let write = {
            let mut all = self.refusals();
            let known = all.contains_key(peer) || all.len() < MAX_PEERS;
            let key = if known { peer } else { "others" };
            let peer = all.entry(key.to_owned()).or_insert(Refusals {
                since: now,
                written: 0,
                counted: 0,
            });
            let write = peer.written < REFUSALS;
            if write {
                peer.written += 1;
            } else {
                peer.counted += 1;
            }
            write
        };
        if write {
            self.write(line);
        }
    }

    /// Writes the counts of windows that are over.
    pub fn sweep(&self) {
        self.sweep_at(Instant::now());
    }

    fn sweep_at(&self, now: Instant) {
        let over: Vec<(String, u64)> = {
            let mut all = self.refusals();
            let is_over = |found: &Refusals| now.saturating_duration_since(found.since) >= WINDOW;
            all.extract_if(|_, found| is_over(found))
                .map(|(peer, found)| (peer, found.counted))
                .collect()
        };
        for (remote, counted) in over.into_iter().filter(|(_, counted)| *counted > 0) {
            self.write(Line {
                ts: now_text(),
                actor: "-".to_owned(),
                remote,
                refused: Some(counted),
                ..Line::default()
            });
        }
    }

    fn refusals(&self) -> MutexGuard<'_, HashMap<String, Refusals>> {
        self.refusals.lock()
    }
}

/// The time as lines have it.
pub fn now_text() -> String {
    humantime::format_rfc3339_millis(SystemTime::now()).to_string()
}

#[derive(Debug)]
struct Log {
    path: PathBuf,
    limits: Limits,
    file: File,
    /// Bytes in the file.
    len: u64,
    /// Digest of the last line that is in the file.
    last: String,
    /// The last write failed; it is reported once.
    failing: bool,
}

impl Log {
    fn open(path: &Path, limits: Limits) -> io::Result<Self> {
        let mut file = append(path)?;
        let mut last = last_line(&mut file)?;
        if last.is_none() {
            // A crash between a rotation and the first line of the new file.
            last = match File::open(numbered(path, 1)) {
                Ok(mut before) => last_line(&mut before)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
        }
        Ok(Self {
            path: path.to_owned(),
            limits,
            len: file.metadata()?.len(),
            file,
            last: last.map_or_else(|| BEGIN.to_owned(), |line| digest(&line)),
            failing: false,
        })
    }

    fn reopen(&mut self) -> io::Result<()> {
        self.file = append(&self.path)?;
        self.len = self.file.metadata()?.len();
        if self.len == 0 {
            self.begin();
        }
        Ok(())
    }

    /// The first line of a new file: it makes the chain survive a restart although the last line is in another file.
    fn begin(&mut self) {
        self.append(Line {
            ts: now_text(),
            actor: "-".to_owned(),
            method: "ROTATE".to_owned(),
            ..Line::default()
        });
    }

    fn add(&mut self, line: Line) {
        if self.len >= self.limits.max_bytes {
            match self.rotate() {
                Ok(()) => tracing::info!(head = self.last, "the audit log was rotated"),
                Err(error) => self.report(&error),
            }
        }
        self.append(line);
    }

    fn rotate(&mut self) -> io::Result<()> {
        for number in (1..self.limits.keep).rev() {
            match std::fs::rename(
                numbered(&self.path, number),
                numbered(&self.path, number + 1),
            ) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        if self.limits.keep == 0 {
            std::fs::remove_file(&self.path)?;
        } else {
            std::fs::rename(&self.path, numbered(&self.path, 1))?;
        }
        self.reopen()
    }

    fn append(&mut self, mut line: Line) {
        line.cut();
        line.prev.clone_from(&self.last);
        let Ok(mut text) = serde_json::to_string(&line) else {
            return;
        };
        let digest = digest(text.as_bytes());
        text.push('\n');
        match self.file.write_all(text.as_bytes()) {
            Ok(()) => {
                self.len += text.len() as u64;
                self.last = digest;
                self.failing = false;
            }
            Err(error) => {
                metrics::counter!("forkd_audit_errors_total").increment(1);
                self.report(&error);
                // Half a line would break the chain: the next line would be written behind it.
                if let Err(error) = self.file.set_len(self.len) {
                    self.report(&error);
                }
            }
        }
    }

    /// Reports the first of several failures in a row.
    fn report(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.failing, true) {
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

fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{number}"));
    name.into()
}

/// The last complete line, whatever its length. A tail that a crash cut off is removed, so that it breaks no chain.
fn last_line(file: &mut File) -> io::Result<Option<Vec<u8>>> {
    let len = file.metadata()?.len();
    let mut tail: Vec<u8> = Vec::new();
    let mut start = len;
    loop {
        let end = tail.iter().rposition(|byte| *byte == b'\n');
        let begin = end.and_then(|end| tail[..end].iter().rposition(|byte| *byte == b'\n'));
        match (begin, end, start) {
            (Some(begin), Some(end), _) => {
                file.set_len(start + end as u64 + 1).or_else(read_only)?;
                return Ok(Some(tail[begin + 1..end].to_vec()));
            }
            (None, Some(end), 0) => {
                file.set_len(end as u64 + 1).or_else(read_only)?;
                return Ok(Some(tail[..end].to_vec()));
            }
            (None, None, 0) => {
                file.set_len(0).or_else(read_only)?;
                return Ok(None);
            }
            _ => {}
        }
        let from = start.saturating_sub(CHUNK);
        let mut chunk = vec![0; usize::try_from(start - from).unwrap_or(0)];
        file.seek(SeekFrom::Start(from))?;
        file.read_exact(&mut chunk)?;
        chunk.append(&mut tail);
        tail = chunk;
        start = from;
    }
}

/// A rotated file is only read.
fn read_only(error: io::Error) -> io::Result<()> {
    match error.raw_os_error() {
        Some(code)
            if code == rustix::io::Errno::INVAL.raw_os_error()
                || code == rustix::io::Errno::BADF.raw_os_error() =>
        {
            Ok(())
        }
        _ => Err(error),
    }
}

fn digest(line: &[u8]) -> String {
    format!("b3:{}", blake3::hash(line).to_hex())
}

/// Checks the chain of a log's lines. Returns how many there are, or the number of the first line that does not follow
/// the one before it. The text may be several files, the oldest first.
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
        previous = Some(digest(text.as_bytes()));
        count += 1;
    }
    Ok(count)
}

/// Whether a line of the text has this digest: an anchor that is missing means that the log was cut or written anew.
pub fn has_anchor(text: &str, anchor: &str) -> bool {
    text.lines().any(|line| digest(line.as_bytes()) == anchor)
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
            ..Line::default()
        }
    }

    fn open(path: &Path) -> Audit {
        Audit::open(Some(path), Limits::default()).unwrap()
    }

    #[test]
    fn the_chain_goes_on_after_a_restart_and_shows_a_missing_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        for _ in 0..2 {
            let audit = open(&path);
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
        assert!(has_anchor(&text, &open(&path).head().unwrap()));
        assert!(!has_anchor(&without.join("\n"), &digest(b"cut off")));
    }

    #[test]
    fn a_path_is_cut_and_a_line_of_any_length_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        open(&path).write(line(&"\u{1}".repeat(60_000)));
        assert!(std::fs::metadata(&path).unwrap().len() < 8 * MAX_TEXT as u64);
        // A line of a daemon that did not cut.
        let long = serde_json::to_string(&Line {
            prev: open(&path).head().unwrap(),
            ..line(&"x".repeat(1 << 20))
        });
        let mut file = append(&path).unwrap();
        writeln!(file, "{}", long.unwrap()).unwrap();
        open(&path).write(line("/after"));
        assert_eq!(verify(&std::fs::read_to_string(&path).unwrap()), Ok(3));
    }

    #[test]
    fn a_line_that_a_crash_cut_off_breaks_no_chain() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        open(&path).write(line("/a"));
        append(&path).unwrap().write_all(b"{\"ts\":\"20").unwrap();
        open(&path).write(line("/b"));
        assert_eq!(verify(&std::fs::read_to_string(&path).unwrap()), Ok(2));
    }

    #[test]
    fn files_are_rotated_and_bounded_and_the_chain_goes_through() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let limits = Limits {
            max_bytes: 4096,
            keep: 2,
        };
        for number in 0..40 {
            // A restart before every line: also one right after a rotation.
            let audit = Audit::open(Some(&path), limits).unwrap();
            audit.write(line(&format!("/{number}/{}", "x".repeat(500))));
        }
        assert!(numbered(&path, 2).exists() && !numbered(&path, 3).exists());
        let files = [numbered(&path, 2), numbered(&path, 1), path];
        let text: String = files
            .iter()
            .map(|file| std::fs::read_to_string(file).unwrap())
            .collect();
        assert!(text.len() < 3 * 6000, "{}", text.len());
        assert!(verify(&text).unwrap() > 10);
    }

    #[test]
    fn refused_requests_of_a_peer_become_a_count() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let audit = open(&path);
        let start = Instant::now();
        for _ in 0..10_000 {
            audit.write_refused_at("10.0.0.1", line("/"), start);
        }
        audit.write_refused_at("10.0.0.2", line("/"), start);
        let lines = || std::fs::read_to_string(&path).unwrap().lines().count() as u64;
        assert_eq!(lines(), REFUSALS + 1);
        audit.sweep_at(start + WINDOW);
        assert_eq!(lines(), REFUSALS + 2);
        let text = std::fs::read_to_string(&path).unwrap();
        let last: Line = serde_json::from_str(text.lines().next_back().unwrap()).unwrap();
        assert_eq!(last.refused, Some(10_000 - REFUSALS));
        assert_eq!(last.remote, "10.0.0.1");
        for number in 0..2 * MAX_PEERS {
            audit.write_refused_at(&format!("p{number}"), line("/"), start);
        }
        assert!(audit.refusals().len() <= MAX_PEERS + 1);
    }

    #[test]
    fn a_line_that_could_not_be_written_is_not_in_the_chain() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        let mut log = Log::open(&path, Limits::default()).unwrap();
        log.add(line("/a"));
        let writable = std::mem::replace(&mut log.file, File::open(&path).unwrap());
        log.add(line("/lost"));
        log.file = writable;
        log.add(line("/b"));
        assert_eq!(verify(&std::fs::read_to_string(&path).unwrap()), Ok(2));
    }
}
