//! Places that hold artifacts as OCI layouts: folders and archive files.
//!
//! [`Place`] is read from, [`Shelf`] is also written to. A blob gets its name when it is whole, and the index of a
//! folder changes by one rename: a reader sees an artifact whole or not at all. Blobs that are there are not written
//! again, so a second push, or one that was interrupted, writes only the rest.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use forkd_oci::archive::Archive;
use forkd_oci::digest::Hasher;
use forkd_types::path_error;

use crate::archive::{INDEX_FILE, LAYOUT, LAYOUT_FILE, blob_path};
use crate::documents::{Documents, Signature};
use crate::error::HubError;
use crate::limits;
use crate::manifest::{
    Artifact, Descriptor, Index, REF_NAME, SIGNATURE_TYPE, bounded, checked, parse, to_bytes,
};
use crate::published;

/// A place that artifacts are read from. Callers compare everything with its digest.
pub trait Place {
    /// The place, for messages.
    fn describe(&self) -> String;
    /// The manifests that the place has, for this name or all.
    fn index(&self, name: Option<&str>) -> Result<Index, HubError>;
    /// Manifests that refer to an artifact.
    fn referrers(&self, artifact: &Artifact) -> Result<Vec<Descriptor>, HubError>;
    /// All bytes of a small blob or manifest.
    fn small(&self, blob: &Descriptor, limit: u64) -> Result<Vec<u8>, HubError>;
    /// The content of a pack.
    fn pack(&self, pack: &Descriptor) -> Result<Box<dyn Read + Send>, HubError>;
    /// Told that packs have arrived where they belong: copies on this host are not needed any more.
    fn arrived(&self, _: &[Descriptor]) {}
}

/// The content of a blob, readable several times.
pub type Content<'a> = &'a dyn Fn() -> io::Result<Box<dyn Read + Send>>;

/// A place that artifacts are written to.
pub trait Shelf: Place {
    /// Whether a blob is there already.
    fn has(&self, blob: &Descriptor) -> Result<bool, HubError>;
    /// Writes a blob. Its digest is compared before it gets its name. Answers how many bytes were sent.
    fn put(&self, blob: &Descriptor, content: Content<'_>) -> Result<u64, HubError>;
    /// Makes an artifact visible under a name. All its blobs are there.
    fn publish(&self, name: &str, documents: &Documents) -> Result<(), HubError>;
}

/// Reads the documents of the artifact with this name. Without a name, the place must hold one artifact.
pub fn load(place: &dyn Place, name: Option<&str>) -> Result<Documents, HubError> {
    let index = place.index(name)?;
    let entry = choose(place, &index, name)?;
    bounded("bytes of manifest", entry.size, limits::MANIFEST)?;
    let manifest = place.small(entry, limits::MANIFEST)?;
    checked("the manifest", &manifest, entry.digest)?;
    let artifact = Artifact::parse(manifest).map_err(|error| match error {
        HubError::ContainerImage { .. } => HubError::ContainerImage {
            place: place.describe(),
        },
        other => other,
    })?;
    let config = place.small(&artifact.config, limits::CONFIG)?;
    let pages = place.small(&artifact.index, limits::INDEX)?;
    let mut documents = Documents::parse(artifact, config, pages)?;
    if let Some(hashes) = documents.artifact.hashes.clone() {
        let limit = documents.hashes_limit();
        bounded("bytes of page hashes", hashes.size, limit)?;
        documents.set_hashes(&place.small(&hashes, limit)?)?;
    }
    let referrers = place.referrers(&documents.artifact)?;
    for entry in referrers.iter().take(limits::SIGNATURES) {
        if let Some(signature) = signature(place, entry, &documents)? {
            documents.add_signature(signature)?;
        }
    }
    Ok(documents)
}

fn signature(
    place: &dyn Place,
    entry: &Descriptor,
    documents: &Documents,
) -> Result<Option<Signature>, HubError> {
    let manifest = place.small(entry, limits::SIGNATURE)?;
    checked("the manifest of a signature", &manifest, entry.digest)?;
    let Some(blob) = Signature::blob_of(&manifest, documents.artifact.digest)? else {
        return Ok(None);
    };
    let text = place.small(&blob, limits::SIGNATURE)?;
    checked("a signature", &text, blob.digest)?;
    Ok(Some(Signature { manifest, text }))
}

fn choose<'a>(
    place: &dyn Place,
    index: &'a Index,
    name: Option<&str>,
) -> Result<&'a Descriptor, HubError> {
    let artifacts = || index.manifests.iter().filter(|entry| !is_signature(entry));
    let mut found: Vec<&Descriptor> = match name {
        Some(name) => artifacts()
            .filter(|entry| name_of(entry) == Some(name) || entry.digest.to_string() == name)
            .collect(),
        None => artifacts().collect(),
    };
    match (found.pop(), found.is_empty() || name.is_some()) {
        (Some(entry), true) => Ok(entry),
        _ => {
            let mut there: Vec<&str> = index.manifests.iter().filter_map(name_of).collect();
            there.truncate(20);
            Err(HubError::NoName {
                name: name.unwrap_or_default().to_owned(),
                place: place.describe(),
                there: if there.is_empty() {
                    "nothing".into()
                } else {
                    there.join(", ")
                },
            })
        }
    }
}

fn name_of(entry: &Descriptor) -> Option<&str> {
    entry.annotations.get(REF_NAME).map(String::as_str)
}

fn is_signature(entry: &Descriptor) -> bool {
    entry.artifact_type.as_deref() == Some(SIGNATURE_TYPE)
}

/// The entries of an index that may be signatures.
pub fn signatures_in(index: &Index) -> Vec<Descriptor> {
    let entries = index.manifests.iter().filter(|entry| is_signature(entry));
    entries.cloned().collect()
}

/// A layout in one archive file.
#[derive(Debug)]
pub struct ArchiveFile {
    archive: Archive,
}

impl ArchiveFile {
    /// Opens a file that `forkd pack` or another tool wrote.
    pub fn open(path: &Path) -> Result<Self, HubError> {
        if published::looks_published(path) {
            let found = published::inspect(path)?;
            return Err(HubError::Published {
                place: path.display().to_string(),
                summary: found.summary(),
            });
        }
        let archive = Archive::open(path).map_err(|error| match error {
            forkd_oci::OciError::Io {
                action,
                path,
                source,
            } if source.kind() != io::ErrorKind::Other => path_error(action, path)(source).into(),
            other => HubError::invalid(forkd_types::chain(&other)),
        })?;
        if archive.get(INDEX_FILE).is_none() {
            return Err(HubError::invalid(format!(
                "{} has no {INDEX_FILE}: it is not a packed snapshot",
                path.display()
            )));
        }
        Ok(Self { archive })
    }

    fn part(&self, name: &str) -> Result<forkd_oci::part::Part, HubError> {
        let part = self.archive.get(name);
        part.ok_or_else(|| HubError::invalid(format!("{} has no {name}", self.describe())))
    }
}

impl Place for ArchiveFile {
    fn describe(&self) -> String {
        self.archive.path().display().to_string()
    }

    fn index(&self, _: Option<&str>) -> Result<Index, HubError> {
        let part = self.part(INDEX_FILE)?;
        bounded("bytes of index", part.length, limits::MANIFEST)?;
        let bytes = part
            .read()
            .map_err(path_error("read", self.archive.path()))?;
        parse(&bytes, "the index of the layout")
    }

    fn referrers(&self, _: &Artifact) -> Result<Vec<Descriptor>, HubError> {
        Ok(signatures_in(&self.index(None)?))
    }

    fn small(&self, blob: &Descriptor, limit: u64) -> Result<Vec<u8>, HubError> {
        let part = self.part(&blob_path(&blob.digest))?;
        bounded("bytes in a document", part.length, limit)?;
        let read = part.read();
        Ok(read.map_err(path_error("read", self.archive.path()))?)
    }

    fn pack(&self, pack: &Descriptor) -> Result<Box<dyn Read + Send>, HubError> {
        Ok(Box::new(self.part(&blob_path(&pack.digest))?.reader()))
    }
}

/// A layout in a folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// A folder that is read. It must be a layout.
    pub fn open(path: &Path) -> Result<Self, HubError> {
        let index = path.join(INDEX_FILE);
        File::open(&index).map_err(path_error("open", index))?;
        Ok(Self {
            path: path.to_owned(),
        })
    }

    /// A folder that is written to. It is made if it is missing.
    pub fn create(path: &Path) -> Result<Self, HubError> {
        let blobs = path.join("blobs/sha256");
        std::fs::create_dir_all(&blobs).map_err(path_error("create", &blobs))?;
        let folder = Self {
            path: path.to_owned(),
        };
        folder.replace(LAYOUT_FILE, LAYOUT)?;
        Ok(folder)
    }

    fn blob(&self, blob: &Descriptor) -> PathBuf {
        self.path.join(blob_path(&blob.digest))
    }

    fn read_index(&self) -> Result<Index, HubError> {
        let path = self.path.join(INDEX_FILE);
        match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Index::default()),
            file => {
                let file = file.map_err(path_error("open", &path))?;
                parse(
                    &read_limited(&path, file, limits::MANIFEST)?,
                    "the index of the layout",
                )
            }
        }
    }

    /// Writes a file beside its name and renames it.
    fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), HubError> {
        let path = self.path.join(name);
        let draft = Draft::beside(&path);
        let write = || -> io::Result<()> {
            let mut file = File::create(&draft.0)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            std::fs::rename(&draft.0, &path)
        };
        Ok(write().map_err(path_error("write", &path))?)
    }
}

impl Place for Folder {
    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn index(&self, _: Option<&str>) -> Result<Index, HubError> {
        self.read_index()
    }

    fn referrers(&self, _: &Artifact) -> Result<Vec<Descriptor>, HubError> {
        Ok(signatures_in(&self.read_index()?))
    }

    fn small(&self, blob: &Descriptor, limit: u64) -> Result<Vec<u8>, HubError> {
        let path = self.blob(blob);
        let file = File::open(&path).map_err(path_error("open", &path))?;
        read_limited(&path, file, limit)
    }

    fn pack(&self, pack: &Descriptor) -> Result<Box<dyn Read + Send>, HubError> {
        let path = self.blob(pack);
        let file = File::open(&path).map_err(path_error("open", path))?;
        Ok(Box::new(file))
    }
}

impl Shelf for Folder {
    fn has(&self, blob: &Descriptor) -> Result<bool, HubError> {
        let found = std::fs::metadata(self.blob(blob));
        Ok(found.is_ok_and(|about| about.len() == blob.size))
    }

    fn put(&self, blob: &Descriptor, content: Content<'_>) -> Result<u64, HubError> {
        let mut content = content().map_err(HubError::Stream)?;
        let path = self.blob(blob);
        let draft = Draft::beside(&path);
        let mut file = File::create(&draft.0).map_err(path_error("create", &draft.0))?;
        let mut hasher = Hasher::default();
        copy(&mut content, blob.size, |bytes| {
            hasher.update(bytes);
            let written = file.write_all(bytes);
            Ok(written.map_err(path_error("write", &draft.0))?)
        })?;
        let found = hasher.finish();
        if found != blob.digest {
            return Err(HubError::Digest {
                what: "a blob".into(),
                expected: blob.digest.to_string(),
                found: found.to_string(),
            });
        }
        file.sync_all().map_err(path_error("sync", &draft.0))?;
        std::fs::rename(&draft.0, &path).map_err(path_error("rename to", &path))?;
        Ok(blob.size)
    }

    fn publish(&self, name: &str, documents: &Documents) -> Result<(), HubError> {
        let path = self.path.join(".forkd.lock");
        let lock = File::create(&path).map_err(path_error("create", &path))?;
        lock.lock().map_err(path_error("lock", &path))?;
        let mut index = self.read_index()?;
        let fresh = crate::archive::layout_index(documents, name);
        let replaced = |entry: &Descriptor| {
            entry
                .annotations
                .get(REF_NAME)
                .is_some_and(|found| found == name)
                || fresh
                    .manifests
                    .iter()
                    .any(|new| new.digest == entry.digest && new.annotations == entry.annotations)
        };
        index.manifests.retain(|entry| !replaced(entry));
        index.manifests.extend(fresh.manifests);
        self.replace(INDEX_FILE, &to_bytes(&index))
    }
}

/// A file that is removed unless it was renamed.
struct Draft(PathBuf);

impl Draft {
    fn beside(path: &Path) -> Self {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = format!(".{name}.{}-{number}.part", std::process::id());
        Self(path.with_file_name(name))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Already renamed to its name: nothing to remove.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Gives exactly `size` bytes to `write`.
pub fn copy(
    content: &mut dyn Read,
    size: u64,
    mut write: impl FnMut(&[u8]) -> Result<(), HubError>,
) -> Result<(), HubError> {
    let mut buffer = vec![0; 256 << 10];
    let mut left = size;
    while left > 0 {
        let want = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(buffer.len()));
        let read = content
            .read(buffer.get_mut(..want).unwrap_or_default())
            .map_err(HubError::Stream)?;
        if read == 0 {
            return Err(HubError::Stream(io::ErrorKind::UnexpectedEof.into()));
        }
        write(buffer.get(..read).unwrap_or_default())?;
        left -= read as u64;
    }
    Ok(())
}

fn read_limited(path: &Path, file: File, limit: u64) -> Result<Vec<u8>, HubError> {
    let mut bytes = Vec::new();
    let read = file.take(limit + 1).read_to_end(&mut bytes);
    read.map_err(path_error("read", path))?;
    bounded("bytes in a document", bytes.len() as u64, limit)?;
    Ok(bytes)
}
