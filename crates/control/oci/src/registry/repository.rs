//! One repository that is read and written: manifests by tag or digest, blobs by digest.
//!
//! ```text
//!   POST …/blobs/uploads/  ─►  PATCH a chunk ─► … ─► PUT ?digest=     the registry compares the digest
//!                                  └── broken: GET the upload, go on where the registry is
//! ```
//!
//! The address of an unfinished upload is kept in a file, so a later process goes on where this one ended. A registry that
//! gives up an upload whose chunk broke off gets that blob again. Mirrors are asked for content only; writes go to the
//! registry of the name.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use reqwest::blocking::Response;
use reqwest::header::{
    ACCEPT, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderName, LOCATION, RANGE,
};

use super::session::Session;
use super::{Blobs, Pull, RegistryError, Wanted, Watch, one_of};
use crate::digest::Digest;
use crate::error::OciError;
use crate::http::{bounded, upload_time};
use crate::limits;
use crate::manifest::ACCEPTED;
use crate::part::Part;

/// Bytes of one request of an upload. An interrupted upload sends at most this many bytes again.
const CHUNK: usize = 4 << 20;
/// Longest address of an upload.
const MAX_LOCATION: usize = 8 << 10;

/// A repository, and the folder that notes of unfinished uploads lie in.
#[derive(Debug)]
pub struct Repository {
    /// Mirrors, then the registry.
    places: Vec<Session>,
    notes: PathBuf,
}

/// The content of a blob, readable several times.
pub type Content<'a> = &'a dyn Fn() -> io::Result<Box<dyn Read + Send>>;

impl Repository {
    /// Nothing is asked yet.
    pub fn open(access: &Pull<'_>, notes: PathBuf) -> Result<Self, RegistryError> {
        std::fs::create_dir_all(&notes).map_err(OciError::io("make the folder", &notes))?;
        let places = access.sessions()?;
        Ok(Self { places, notes })
    }

    fn registry(&self) -> Result<&Session, RegistryError> {
        self.places.last().ok_or(RegistryError::Stopped)
    }

    /// Host and repository, for people.
    pub fn describe(&self) -> String {
        let place = self.places.last();
        place.map_or_else(String::new, |place| {
            format!("{}/{}", place.host(), place.repository())
        })
    }

    /// The manifest or index with a tag or digest; nothing if the repository has none.
    pub fn manifest(&self, reference: &str) -> Result<Option<Vec<u8>>, RegistryError> {
        self.document(&format!("manifests/{reference}"), &format!("{reference:?}"))
    }

    /// The list of manifests that refer to one. A registry without such lists has nothing.
    pub fn referrers(&self, subject: Digest) -> Result<Option<Vec<u8>>, RegistryError> {
        match self.document(&format!("referrers/{subject}"), "list of referrers") {
            Err(RegistryError::Status { .. }) => Ok(None),
            other => other,
        }
    }

    /// The tags of the repository, as the registry lists them.
    pub fn tags(&self) -> Result<Option<Vec<u8>>, RegistryError> {
        self.document("tags/list", "list of tags")
    }

    fn document(&self, path: &str, what: &str) -> Result<Option<Vec<u8>>, RegistryError> {
        let mut failures = Vec::new();
        for place in &self.places {
            let got = place.get(path, what, ACCEPTED, 0);
            match got.and_then(|answer| bounded(answer, what, limits::MANIFEST)) {
                Ok(bytes) => return Ok(Some(bytes)),
                Err(RegistryError::NotFound { .. }) => {}
                Err(error) => failures.push((place.host().to_owned(), error)),
            }
        }
        if failures.is_empty() {
            return Ok(None);
        }
        Err(one_of(failures, what))
    }

    /// All bytes of a small blob. The caller compares them with the digest.
    pub fn small(&self, digest: Digest, limit: u64) -> Result<Vec<u8>, RegistryError> {
        let what = format!("the blob {digest}");
        let mut failures = Vec::new();
        for place in &self.places {
            let got = place.get(&format!("blobs/{digest}"), &what, "*/*", 0);
            match got.and_then(|answer| bounded(answer, &what, limit)) {
                Ok(bytes) => return Ok(bytes),
                Err(error) => failures.push((place.host().to_owned(), error)),
            }
        }
        Err(one_of(failures, &what))
    }

    /// A blob on this host: fetched, resumed, and compared with its digest.
    pub fn blob(
        &self,
        wanted: &Wanted,
        blobs: &Blobs,
        watch: &Watch<'_>,
    ) -> Result<Part, RegistryError> {
        blobs.get(&self.places, wanted, watch)
    }

    /// Whether the registry has a blob of this size.
    pub fn has(&self, digest: Digest, size: u64) -> Result<bool, RegistryError> {
        let asked =
            self.registry()?
                .send(&format!("blobs/{digest}"), "the blob", &|client, url| {
                    client.head(url)
                });
        match asked {
            Ok(answer) => {
                let length = answer.headers().get(CONTENT_LENGTH);
                let length = length.and_then(|text| text.to_str().ok()?.parse::<u64>().ok());
                Ok(length.is_none_or(|length| length == size))
            }
            Err(RegistryError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Uploads a manifest or an index, under a tag or its digest.
    pub fn put_manifest(
        &self,
        reference: &str,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<(), RegistryError> {
        let what = format!("the manifest {reference}");
        let answer =
            self.registry()?
                .send(&format!("manifests/{reference}"), &what, &|client, url| {
                    let request = client.put(url).header(CONTENT_TYPE, media_type);
                    request.body(bytes.to_vec())
                })?;
        drop(answer);
        Ok(())
    }

    /// Uploads a blob. Answers how many bytes were sent: an upload that was interrupted sends the rest only.
    pub fn put_blob(&self, blob: &Wanted, content: Content<'_>) -> Result<u64, RegistryError> {
        let session = self.registry()?;
        let note = Note::of(self, blob.digest);
        let earlier = note.read().and_then(|location| {
            let upload = Upload::status(session, &location, blob).ok()?;
            (upload.at <= blob.size).then_some(upload)
        });
        let mut upload = match earlier {
            Some(earlier) => earlier,
            None => Upload::begin(session, blob)?,
        };
        let mut attempt = 1;
        loop {
            match upload.finish(blob, content, &note) {
                // The registry has other bytes than these, or has given the upload up. Some do so whenever a chunk
                // breaks off.
                Err(RegistryError::Status { .. } | RegistryError::NotFound { .. })
                    if attempt < limits::ATTEMPTS =>
                {
                    upload = Upload::begin(session, blob)?;
                    attempt += 1;
                }
                other => return other,
            }
        }
    }
}

/// An upload that the registry waits for.
struct Upload<'a> {
    session: &'a Session,
    location: String,
    /// Bytes that the registry has.
    at: u64,
}

impl<'a> Upload<'a> {
    fn begin(session: &'a Session, blob: &Wanted) -> Result<Self, RegistryError> {
        let answer = session.send("blobs/uploads/", &blob.what, &|client, url| {
            client.post(url).header(CONTENT_LENGTH, 0)
        })?;
        Ok(Self {
            session,
            location: location(session, &answer)?,
            at: 0,
        })
    }

    /// Asks where an upload is.
    fn status(session: &'a Session, address: &str, blob: &Wanted) -> Result<Self, RegistryError> {
        let answer = session.send(address, &blob.what, &|client, url| {
            client.get(url).header(ACCEPT, "*/*")
        })?;
        Ok(Self {
            session,
            location: location(session, &answer).unwrap_or_else(|_| address.to_owned()),
            at: received(session, &answer)?,
        })
    }

    /// Sends the rest and ends the upload. The registry refuses bytes that do not have the digest.
    fn finish(
        &mut self,
        blob: &Wanted,
        content: Content<'_>,
        note: &Note,
    ) -> Result<u64, RegistryError> {
        let unreadable = |source| RegistryError::Content {
            what: blob.what.clone(),
            source,
        };
        let mut content = content().map_err(unreadable)?;
        skip(&mut content, self.at).map_err(unreadable)?;
        let mut sent = 0;
        if self.at == 0 && blob.size <= CHUNK as u64 {
            let mut whole = Vec::new();
            let read = content.take(blob.size).read_to_end(&mut whole);
            read.map_err(unreadable)?;
            sent += whole.len() as u64;
            return self.end(blob, &whole).map(|()| sent);
        }
        while self.at < blob.size {
            let left = usize::try_from(blob.size - self.at).unwrap_or(CHUNK);
            let mut chunk = vec![0; CHUNK.min(left)];
            content.read_exact(&mut chunk).map_err(unreadable)?;
            self.chunk(blob, &chunk)?;
            // Before the next chunk is read: each address is good for one position only.
            note.write(&self.location);
            sent += chunk.len() as u64;
        }
        self.end(blob, &[])?;
        note.remove();
        Ok(sent)
    }

    /// Sends one chunk. A request whose answer is lost may have arrived, so the registry is asked before it is repeated.
    fn chunk(&mut self, blob: &Wanted, chunk: &[u8]) -> Result<(), RegistryError> {
        let first = self.at;
        let end = first + chunk.len() as u64;
        let mut attempt = 1;
        while self.at < end {
            let from = usize::try_from(self.at - first).unwrap_or(usize::MAX);
            let rest = chunk.get(from..).unwrap_or_default().to_vec();
            let range = format!("{}-{}", self.at, end - 1);
            let sent = self
                .session
                .try_send(&self.location, &blob.what, &|client, url| {
                    client
                        .patch(url)
                        .header(CONTENT_TYPE, "application/octet-stream")
                        .header(CONTENT_RANGE, &range)
                        .timeout(upload_time(rest.len() as u64))
                        .body(rest.clone())
                });
            match sent {
                Ok(answer) => {
                    self.location = location(self.session, &answer)?;
                    self.at = received(self.session, &answer)?;
                }
                Err(error) if error.is_temporary() && attempt < limits::ATTEMPTS => {
                    let now = Self::status(self.session, &self.location, blob)?;
                    (self.location, self.at) = (now.location, now.at);
                }
                Err(error) => return Err(error),
            }
            // A registry that went back would need bytes that are not in memory any more.
            if self.at < first || self.at > end {
                return Err(RegistryError::Status {
                    host: self.session.host().to_owned(),
                    status: 416,
                });
            }
            attempt += 1;
            if attempt > limits::RESUMES {
                return Err(wrong(self.session, "it takes no bytes"));
            }
        }
        Ok(())
    }

    fn end(&self, blob: &Wanted, rest: &[u8]) -> Result<(), RegistryError> {
        let mark = if self.location.contains('?') {
            '&'
        } else {
            '?'
        };
        let address = format!("{}{mark}digest={}", self.location, blob.digest);
        let ended = self.session.try_send(&address, &blob.what, &|client, url| {
            client
                .put(url)
                .header(CONTENT_TYPE, "application/octet-stream")
                .timeout(upload_time(rest.len() as u64))
                .body(rest.to_vec())
        });
        match ended {
            Ok(_) => Ok(()),
            Err(error) if error.is_temporary() => {
                // The registry may have ended the upload although its answer was lost.
                let path = format!("blobs/{}", blob.digest);
                let there = self
                    .session
                    .send(&path, &blob.what, &|client, url| client.head(url));
                there.map(drop).map_err(|_| error)
            }
            Err(error) => Err(error),
        }
    }
}

fn wrong(session: &Session, problem: &'static str) -> RegistryError {
    RegistryError::Upload {
        host: session.host().to_owned(),
        problem,
    }
}

fn header(answer: &Response, name: HeaderName) -> Option<&str> {
    answer.headers().get(name)?.to_str().ok()
}

fn location(session: &Session, answer: &Response) -> Result<String, RegistryError> {
    let given = header(answer, LOCATION).filter(|text| text.len() <= MAX_LOCATION);
    let given = given.ok_or_else(|| wrong(session, "it names no address for the upload"))?;
    Ok(given.to_owned())
}

/// Bytes that the registry has. `0-0` is an empty upload: chunks are longer than one byte.
fn received(session: &Session, answer: &Response) -> Result<u64, RegistryError> {
    let text = header(answer, RANGE).unwrap_or("0-0");
    let text = text.strip_prefix("bytes=").unwrap_or(text);
    let last = text
        .strip_prefix("0-")
        .and_then(|last| last.parse::<u64>().ok());
    match last {
        Some(0) => Ok(0),
        Some(last) if last < u64::MAX => Ok(last + 1),
        _ => Err(wrong(session, "its range is malformed")),
    }
}

fn skip(content: &mut dyn Read, bytes: u64) -> io::Result<()> {
    let skipped = io::copy(&mut content.take(bytes), &mut io::sink())?;
    if skipped < bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}

/// The file with the address of an unfinished upload. The address may be a right to write, so only its owner reads it.
struct Note(PathBuf);

impl Note {
    fn of(repository: &Repository, digest: Digest) -> Self {
        let name = format!("{}@{digest}", repository.describe());
        Self(repository.notes.join(Digest::of(name.as_bytes()).hex()))
    }

    fn read(&self) -> Option<String> {
        let file = std::fs::File::open(&self.0).ok()?;
        let mut text = String::new();
        file.take(MAX_LOCATION as u64)
            .read_to_string(&mut text)
            .ok()?;
        (!text.is_empty()).then_some(text)
    }

    /// A note that cannot be written costs a resumption, not the upload.
    fn write(&self, location: &str) {
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let _ = options
            .open(&self.0)
            .and_then(|mut file| file.write_all(location.as_bytes()));
    }

    fn remove(&self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
