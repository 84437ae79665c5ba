//! Blobs on disk: fetched once, resumed where a fetch broke off, checked before they get their name.
//!
//! ```text
//! FOLDER/<hex>        complete; its bytes have the digest of its name
//! FOLDER/<hex>.part   being fetched; locked by the process that fetches it
//! ```

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use reqwest::StatusCode;
use reqwest::header::CONTENT_RANGE;

use super::error::RegistryError;
use crate::digest::{Digest, Hasher};
use crate::error::OciError;
use crate::limits;
use crate::part::Part;

const BUFFER: usize = 128 << 10;
/// Times in a row that a place may give no byte of a blob.
const IDLE: u32 = 3;
/// Every blob gets this long, whatever its size.
const GRACE: Duration = Duration::from_secs(120);

/// A folder of blobs.
#[derive(Debug, Clone)]
pub struct Blobs {
    folder: PathBuf,
}

/// A blob that is wanted.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub digest: Digest,
    pub size: u64,
    /// For people, such as "layer 2 of 5".
    pub what: String,
}

/// A place that sends blobs.
pub trait BlobSource {
    /// Host and port, for people.
    fn host(&self) -> &str;
    /// The answer with a blob, from this byte on. A place without ranges sends the whole blob.
    fn blob(
        &self,
        digest: Digest,
        what: &str,
        from: u64,
    ) -> Result<reqwest::blocking::Response, RegistryError>;
}

/// Told of each piece that arrived, and asked whether to go on.
pub struct Watch<'a> {
    pub arrived: &'a dyn Fn(u64),
    pub stop: &'a AtomicBool,
}

impl Blobs {
    pub fn at(folder: PathBuf) -> Result<Self, OciError> {
        std::fs::create_dir_all(&folder).map_err(OciError::io("make the folder", &folder))?;
        Ok(Self { folder })
    }

    fn path(&self, digest: Digest) -> PathBuf {
        self.folder.join(digest.hex())
    }

    /// The blob, fetched from the first of these places that has it.
    pub fn get(
        &self,
        places: &[impl BlobSource],
        wanted: &Wanted,
        watch: &Watch<'_>,
    ) -> Result<Part, RegistryError> {
        let path = self.path(wanted.digest);
        if let Some(part) = known(&path, wanted)? {
            (watch.arrived)(wanted.size);
            return Ok(part);
        }
        let partial = self.folder.join(format!("{}.part", wanted.digest.hex()));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&partial)
            .map_err(OciError::io("write", &partial))?;
        file.lock().map_err(OciError::io("lock", &partial))?;
        // Another process may have finished it while this one waited.
        if let Some(part) = known(&path, wanted)? {
            (watch.arrived)(wanted.size);
            return Ok(part);
        }
        let mut fetch = Fetch::begin(file, &partial, wanted, watch)?;
        let mut failures = Vec::new();
        for place in places {
            match fetch.from(place) {
                Ok(()) => {
                    std::fs::rename(&partial, &path).map_err(OciError::io("write", &path))?;
                    // The part is read for as long as the pull goes on. Two pulls that wait for each other's parts
                    // would never end if the lock lived as long.
                    let unlocked = fetch.file.unlock();
                    unlocked.map_err(OciError::io("unlock", &path))?;
                    let whole = Part::whole(fetch.file).map_err(OciError::io("read", &path))?;
                    return Ok(whole);
                }
                Err(
                    error @ (RegistryError::Stopped | RegistryError::Image(OciError::Io { .. })),
                ) => {
                    if matches!(&error, RegistryError::Image(OciError::Io { source, .. })
                        if source.kind() == io::ErrorKind::StorageFull)
                    {
                        let _ = std::fs::remove_file(&partial);
                    }
                    return Err(error);
                }
                Err(error) => failures.push((place.host().to_owned(), error)),
            }
        }
        // Wrong bytes must not be in the way of the next attempt; a part is kept if it can be resumed.
        if fetch.at == 0 || fetch.at == wanted.size {
            let _ = std::fs::remove_file(&partial);
        }
        Err(super::one_of(failures, &wanted.what))
    }

    /// Removes a blob that is not needed any more.
    pub fn remove(&self, digest: Digest) {
        // A blob that stays is removed by a later trim.
        let _ = std::fs::remove_file(self.path(digest));
    }

    /// Removes the blobs that were used longest ago, until the rest has at most this many bytes. Parts that no process
    /// fetches are removed when they are a day old.
    pub fn trim(&self, most: u64) -> Result<(), OciError> {
        let failed = || OciError::io("read", &self.folder);
        let mut blobs = Vec::new();
        for entry in std::fs::read_dir(&self.folder).map_err(failed())? {
            let entry = entry.map_err(failed())?;
            let meta = entry.metadata().map_err(failed())?;
            let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            if entry.path().extension().is_some() {
                let old = used
                    .elapsed()
                    .is_ok_and(|age| age > Duration::from_secs(86_400));
                let free = || File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok());
                if old && free() {
                    let _ = std::fs::remove_file(entry.path());
                }
                continue;
            }
            blobs.push((used, meta.len(), entry.path()));
        }
        blobs.sort();
        let mut total: u64 = blobs.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in blobs {
            if total <= most {
                break;
            }
            // A build that reads it has it open.
            std::fs::remove_file(&path).map_err(OciError::io("remove", &path))?;
            total -= bytes;
        }
        Ok(())
    }
}

/// A complete blob. One whose bytes changed on disk is removed and fetched again.
fn known(path: &Path, wanted: &Wanted) -> Result<Option<Part>, RegistryError> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(OciError::io("open", path)(error).into()),
    };
    let mut hasher = Hasher::default();
    io::copy(&mut file, &mut hasher).map_err(OciError::io("read", path))?;
    if hasher.finish() != wanted.digest {
        std::fs::remove_file(path).map_err(OciError::io("remove", path))?;
        return Ok(None);
    }
    // What was used last is removed last.
    let _ = File::options()
        .append(true)
        .open(path)
        .and_then(|file| file.set_modified(SystemTime::now()));
    let part = Part::whole(file).map_err(OciError::io("read", path))?;
    Ok(Some(part))
}

/// One blob on its way.
struct Fetch<'a> {
    file: File,
    path: &'a Path,
    wanted: &'a Wanted,
    watch: &'a Watch<'a>,
    hasher: Hasher,
    at: u64,
    asked: u32,
    until: Instant,
}

impl<'a> Fetch<'a> {
    /// Goes on where an earlier fetch broke off.
    fn begin(
        file: File,
        path: &'a Path,
        wanted: &'a Wanted,
        watch: &'a Watch<'a>,
    ) -> Result<Self, RegistryError> {
        let allowed = GRACE + Duration::from_secs(wanted.size / limits::SLOWEST);
        let mut fetch = Self {
            file,
            path,
            wanted,
            watch,
            hasher: Hasher::default(),
            at: 0,
            asked: 0,
            until: Instant::now() + allowed,
        };
        let there = fetch
            .file
            .metadata()
            .map_err(OciError::io("read", path))?
            .len();
        // A complete part without its name has wrong bytes, or it would have been renamed.
        if there >= wanted.size {
            fetch.restart()?;
        } else {
            fetch.at =
                io::copy(&mut fetch.file, &mut fetch.hasher).map_err(OciError::io("read", path))?;
            (watch.arrived)(fetch.at);
        }
        Ok(fetch)
    }

    fn restart(&mut self) -> Result<(), RegistryError> {
        self.file
            .set_len(0)
            .map_err(OciError::io("write", self.path))?;
        self.file
            .seek(SeekFrom::Start(0))
            .map_err(OciError::io("write", self.path))?;
        self.hasher = Hasher::default();
        self.at = 0;
        Ok(())
    }

    /// Fetches the rest from one place. Connections that break are resumed; bytes that do not have the digest are
    /// fetched once more from the start if some of them came from an earlier attempt.
    fn from(&mut self, place: &impl BlobSource) -> Result<(), RegistryError> {
        let mut resumed = self.at > 0;
        let mut idle = 0;
        loop {
            let before = self.at;
            match self.stream(place) {
                Ok(()) if self.at == self.wanted.size => {
                    let found = std::mem::take(&mut self.hasher).finish();
                    match self.wanted.digest.check(&self.wanted.what, found) {
                        Ok(()) => return Ok(()),
                        Err(_) if resumed => {
                            resumed = false;
                            self.restart()?;
                            continue;
                        }
                        Err(error) => {
                            self.restart()?;
                            return Err(error.into());
                        }
                    }
                }
                Ok(()) => {}
                Err(RegistryError::Truncated { .. }) => {}
                Err(error) => return Err(error),
            }
            self.asked += 1;
            idle = if self.at > before { 0 } else { idle + 1 };
            resumed = self.at > 0;
            if idle >= IDLE || self.asked >= limits::RESUMES {
                return Err(self.truncated(None));
            }
        }
    }

    fn truncated(&self, source: Option<io::Error>) -> RegistryError {
        RegistryError::Truncated {
            what: self.wanted.what.clone(),
            got: self.at,
            size: self.wanted.size,
            source,
        }
    }

    /// One request for the rest.
    fn stream(&mut self, place: &impl BlobSource) -> Result<(), RegistryError> {
        if self.at == self.wanted.size {
            return Ok(());
        }
        let answer = place.blob(self.wanted.digest, &self.wanted.what, self.at);
        let mut answer = match answer {
            // The place cannot go on from here.
            Err(RegistryError::Status { status: 416, .. }) if self.at > 0 => {
                return self.restart();
            }
            other => other?,
        };
        if self.at > 0 && !continues(&answer, self.at) {
            // It sends all of it again.
            self.restart()?;
        }
        let long = || RegistryError::TooLong {
            what: self.wanted.what.clone(),
            limit: self.wanted.size,
        };
        if answer
            .content_length()
            .is_some_and(|length| length > self.wanted.size - self.at)
        {
            return Err(long());
        }
        let mut buffer = vec![0; BUFFER];
        loop {
            if self.watch.stop.load(Ordering::Relaxed) {
                return Err(RegistryError::Stopped);
            }
            if Instant::now() > self.until {
                return Err(RegistryError::TooSlow {
                    what: self.wanted.what.clone(),
                });
            }
            let read = match answer.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(self.truncated(Some(error))),
            };
            if self.at + read as u64 > self.wanted.size {
                return Err(long());
            }
            let bytes = buffer.get(..read).unwrap_or_default();
            self.file
                .write_all(bytes)
                .map_err(OciError::io("write", self.path))?;
            self.hasher.update(bytes);
            self.at += read as u64;
            (self.watch.arrived)(read as u64);
        }
    }
}

/// Whether an answer begins at this byte.
fn continues(answer: &reqwest::blocking::Response, at: u64) -> bool {
    let range = answer
        .headers()
        .get(CONTENT_RANGE)
        .and_then(|value| value.to_str().ok());
    answer.status() == StatusCode::PARTIAL_CONTENT
        && range.is_some_and(|range| range.starts_with(&format!("bytes {at}-")))
}
