//! Tags: making, finding and removing them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use forkd_types::{Digest, Tag};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::error::{StoreError, io_error};
use crate::layout::Layout;
use crate::lease::{Lease, Leases};
use crate::manifest::{BlobRef, MAX_BYTES, MAX_CHAIN, Manifest, ManifestError};
use crate::staging::Staging;
use crate::{blobs, durable, sparse};

/// The format of the whole directory.
const FORMAT: u32 = 1;
const MANIFEST: &str = "manifest.json";
const CHECKSUM: &str = "manifest.b3";

#[derive(Debug, Serialize, Deserialize)]
struct FormatFile {
    format: u32,
}

/// A tag and what can be said about it.
#[derive(Debug, Clone)]
pub enum Entry {
    /// It is whole.
    Whole(Arc<Manifest>),
    /// Something is wrong with it.
    Broken {
        /// Its name.
        tag: Tag,
        /// What is wrong, as a chain of causes.
        problem: String,
    },
}

impl Entry {
    /// Its name.
    pub fn tag(&self) -> &Tag {
        match self {
            Self::Whole(manifest) => &manifest.tag,
            Self::Broken { tag, .. } => tag,
        }
    }
}

/// What to do about tags that build on the one to delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deletion {
    /// Refuse.
    Single,
    /// Delete them too.
    Cascade,
    /// Leave them; they keep working, without their parent's name.
    Force,
}

/// What became of a manifest.
#[derive(Debug)]
pub struct Published {
    /// As stored.
    pub manifest: Arc<Manifest>,
    /// Keeps its blobs.
    pub lease: Lease,
}

/// A file that is now content.
#[derive(Debug)]
pub struct Ingested {
    /// Its digest and length.
    pub blob: BlobRef,
    /// Keeps it until a manifest names it.
    pub lease: Lease,
}

/// What a file was when it was hashed: device, inode, length, change time.
type FileKey = (u64, u64, u64, i64, i64);

/// Snapshots on disk.
#[derive(Debug)]
pub struct Store {
    layout: Layout,
    leases: Leases,
    tags: RwLock<BTreeMap<Tag, Entry>>,
    /// Held while names of blobs and tags change, so that collection never sees a blob between its
    /// arrival and its first lease.
    commit: Mutex<()>,
    hashed: Mutex<HashMap<FileKey, BlobRef>>,
    /// Blobs that survive a power cut. The others become so with the first tag that names them.
    durable: Mutex<BTreeSet<Digest>>,
    /// The most that blobs may take on disk for one more tag to be made.
    limit: Option<u64>,
    /// Keeps other daemons out.
    _lock: File,
    #[cfg(test)]
    pub(crate) fuse: crate::crash_tests::Fuse,
}

impl Store {
    /// Opens a store, or makes one. What an earlier daemon left half done is removed; blobs are not
    /// collected until [`Store::collect`] is called, so that the caller can take its leases first.
    pub fn open(root: impl Into<std::path::PathBuf>) -> Result<Self, StoreError> {
        let layout = Layout::new(root);
        for dir in layout.directories() {
            durable::make_dirs(&dir)?;
        }
        let lock = take_lock(&layout)?;
        check_format(&layout)?;
        empty(&layout.staging())?;
        let store = Self {
            layout,
            leases: Leases::default(),
            tags: RwLock::default(),
            commit: Mutex::default(),
            hashed: Mutex::default(),
            durable: Mutex::default(),
            limit: None,
            _lock: lock,
            #[cfg(test)]
            fuse: crate::crash_tests::Fuse::default(),
        };
        store.load()?;
        Ok(store)
    }

    /// Refuses new tags when blobs take more than this on disk.
    #[must_use]
    pub fn with_limit(mut self, bytes: Option<u64>) -> Self {
        self.limit = bytes;
        self
    }

    /// What blobs may take on disk.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Where things lie.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A directory for what is being written, on the same file system.
    pub fn stage(&self) -> Result<Staging, StoreError> {
        Staging::new(&self.layout.staging())
    }

    /// Keeps these blobs for as long as the lease lives.
    pub fn hold(&self, digests: impl IntoIterator<Item = Digest>) -> Lease {
        self.leases.hold(digests)
    }

    /// Hashes a file that will not change any more and gives it its name as content. The file keeps its
    /// own name too; the caller removes that when nothing refers to it. It need not be synced: that comes with the first
    /// tag that names it.
    pub fn ingest(&self, path: &Path) -> Result<Ingested, StoreError> {
        let blob = self.hash(path)?;
        self.step()?;
        let _commit = self.commit();
        let lease = self.leases.hold([blob.digest]);
        let was_durable = lock(&self.durable).contains(&blob.digest);
        blobs::link(&self.layout, path, &blob, was_durable)?;
        self.step()?;
        Ok(Ingested { blob, lease })
    }

    /// As [`Store::ingest`] for a file that others may change or that lies elsewhere: it is copied first,
    /// by sharing blocks where the file system can.
    pub fn ingest_copy(&self, path: &Path) -> Result<Ingested, StoreError> {
        let staging = self.stage()?;
        let copy = staging.file("copy");
        let from = File::open(path).map_err(io_error("open", path))?;
        let to = File::create(&copy).map_err(io_error("create", &copy))?;
        sparse::copy(&from, &to).map_err(io_error("copy", path))?;
        self.ingest(&copy)
    }

    fn hash(&self, path: &Path) -> Result<BlobRef, StoreError> {
        let meta = std::fs::metadata(path).map_err(io_error("read", path))?;
        let key = (
            meta.dev(),
            meta.ino(),
            meta.len(),
            meta.mtime(),
            meta.mtime_nsec(),
        );
        let cached = lock(&self.hashed).get(&key).copied();
        if let Some(blob) = cached
            && blobs::stat(&self.layout, &blob.digest)?.is_some()
        {
            return Ok(blob);
        }
        let blob = blobs::hash(path)?;
        lock(&self.hashed).insert(key, blob);
        Ok(blob)
    }

    /// Makes a tag visible. Every blob it names must be in the store and leased by the caller.
    pub fn publish(&self, manifest: Manifest) -> Result<Published, StoreError> {
        let tag = manifest.tag.clone();
        self.check_chain(&manifest)?;
        Manifest::parse(&tag, &manifest.to_bytes()).map_err(|source| StoreError::Manifest {
            tag: tag.clone(),
            source,
        })?;
        self.make_durable(&manifest)?;
        self.step()?;
        let staging = self.stage()?;
        let result = self.write_tag(&staging, manifest);
        if result.is_ok() || self.is_dead() {
            staging.forget();
        }
        result
    }

    /// What a tag would name, for somebody who starts from it at once and needs no name: nothing of it is synced,
    /// and it is there for as long as the lease.
    pub fn unnamed(&self, manifest: Manifest) -> Result<Published, StoreError> {
        let _commit = self.commit();
        self.check_blobs(&manifest)?;
        Ok(self.leased(Arc::new(manifest)))
    }

    fn make_durable(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let fresh: Vec<Digest> = {
            let durable = lock(&self.durable);
            let digests = manifest.digests();
            digests.filter(|digest| !durable.contains(digest)).collect()
        };
        blobs::sync(&self.layout, &fresh)?;
        lock(&self.durable).extend(fresh);
        Ok(())
    }

    fn leased(&self, manifest: Arc<Manifest>) -> Published {
        let lease = self.leases.hold(manifest.digests());
        Published { manifest, lease }
    }

    fn write_tag(&self, staging: &Staging, manifest: Manifest) -> Result<Published, StoreError> {
        let bytes = manifest.to_bytes();
        durable::write_new(&staging.file(MANIFEST), &bytes)?;
        self.step()?;
        let sum = format!("{}\n", manifest.digest());
        durable::write_new(&staging.file(CHECKSUM), sum.as_bytes())?;
        durable::sync_dir(staging.path())?;
        self.step()?;
        let _commit = self.commit();
        self.check_blobs(&manifest)?;
        self.check_limit()?;
        let target = self.layout.snapshot(&manifest.tag);
        match durable::rename_new(staging.path(), &target) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(StoreError::Exists { tag: manifest.tag });
            }
            other => other.map_err(io_error("rename to", &target))?,
        }
        self.step()?;
        durable::sync_dir(&self.layout.snapshots())?;
        self.step()?;
        let published = self.leased(Arc::new(manifest));
        let manifest = Arc::clone(&published.manifest);
        self.tags_mut()
            .insert(manifest.tag.clone(), Entry::Whole(manifest));
        Ok(published)
    }

    /// A tag, with a lease on its blobs.
    pub fn get(&self, tag: &Tag) -> Result<Published, StoreError> {
        let _commit = self.commit();
        let manifest = self.manifest(tag)?;
        self.check_blobs(&manifest)?;
        Ok(self.leased(manifest))
    }

    /// A tag's manifest.
    pub fn manifest(&self, tag: &Tag) -> Result<Arc<Manifest>, StoreError> {
        match self.tags().get(tag) {
            Some(Entry::Whole(manifest)) => Ok(Arc::clone(manifest)),
            Some(Entry::Broken { .. }) => read_manifest(&self.layout, tag).map(Arc::new),
            None => Err(StoreError::NotFound { tag: tag.clone() }),
        }
    }

    /// There is a tag of that name, whole or not.
    pub fn contains(&self, tag: &Tag) -> bool {
        self.tags().contains_key(tag)
    }

    /// Every tag, in order.
    pub fn list(&self) -> Vec<Entry> {
        self.tags().values().cloned().collect()
    }

    /// Opens a blob for reading.
    pub fn open_blob(&self, digest: &Digest) -> Result<File, StoreError> {
        let path = self.layout.blob(digest);
        File::open(&path).map_err(io_error("open", path))
    }

    /// Removes a tag and what nobody else needs. Gives the tags that went, in order.
    pub fn delete(&self, tag: &Tag, deletion: Deletion) -> Result<Vec<Tag>, StoreError> {
        if !self.contains(tag) {
            return Err(StoreError::NotFound { tag: tag.clone() });
        }
        let order = match deletion {
            Deletion::Force => vec![tag.clone()],
            Deletion::Cascade => self.subtree(tag),
            Deletion::Single => {
                let dependents = self.dependents(tag);
                if !dependents.is_empty() {
                    return Err(StoreError::HasDependents {
                        tag: tag.clone(),
                        dependents,
                    });
                }
                vec![tag.clone()]
            }
        };
        for tag in &order {
            self.remove_tag(tag)?;
        }
        self.collect()?;
        Ok(order)
    }

    fn remove_tag(&self, tag: &Tag) -> Result<(), StoreError> {
        let _commit = self.commit();
        let from = self.layout.snapshot(tag);
        let trash = self
            .layout
            .staging()
            .join(format!("trash-{:016x}", rand::random::<u64>()));
        match std::fs::rename(&from, &trash) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other.map_err(io_error("remove", &from))?,
        }
        self.step()?;
        durable::sync_dir(&self.layout.snapshots())?;
        self.tags_mut().remove(tag);
        self.step()?;
        if trash.exists() {
            std::fs::remove_dir_all(&trash).map_err(io_error("remove", &trash))?;
        }
        Ok(())
    }

    /// Removes blobs that no tag names and no lease holds. Gives how many bytes came free.
    pub fn collect(&self) -> Result<u64, StoreError> {
        let _commit = self.commit();
        // With a manifest that cannot be read nobody knows what it names: nothing is removed.
        let tags = self.tags();
        let mut named = BTreeSet::new();
        for entry in tags.values() {
            match entry {
                Entry::Whole(manifest) => {
                    named.extend(manifest.digests());
                }
                Entry::Broken { tag, .. } => match read_manifest(&self.layout, tag) {
                    Ok(manifest) => {
                        named.extend(manifest.digests());
                    }
                    Err(_) => return Ok(0),
                },
            }
        }
        let mut freed = 0;
        for digest in blobs::list(&self.layout)? {
            if named.contains(&digest) || self.leases.is_held(&digest) {
                continue;
            }
            self.step()?;
            freed += blobs::stat(&self.layout, &digest)?.map_or(0, |sizes| sizes.physical);
            lock(&self.durable).remove(&digest);
            let path = self.layout.blob(&digest);
            std::fs::remove_file(&path).map_err(io_error("remove", path))?;
        }
        Ok(freed)
    }

    /// As [`Store::collect`], if a lease has ended since.
    pub fn collect_freed(&self) -> Result<u64, StoreError> {
        if self.leases.take_freed() {
            self.collect()
        } else {
            Ok(0)
        }
    }

    /// Tags that build directly on this one.
    pub fn dependents(&self, tag: &Tag) -> Vec<Tag> {
        self.tags()
            .values()
            .filter_map(|entry| match entry {
                Entry::Whole(manifest) => Some(manifest),
                Entry::Broken { .. } => None,
            })
            .filter(|manifest| manifest.parent.as_ref().is_some_and(|p| p.tag == *tag))
            .map(|manifest| manifest.tag.clone())
            .collect()
    }

    /// The tag and all that build on it, those nobody builds on first.
    fn subtree(&self, tag: &Tag) -> Vec<Tag> {
        let mut order = vec![tag.clone()];
        let mut at = 0;
        while let Some(next) = order.get(at).cloned() {
            for dependent in self.dependents(&next) {
                if !order.contains(&dependent) {
                    order.push(dependent);
                }
            }
            at += 1;
        }
        order.reverse();
        order
    }

    /// Tags this one builds on, the oldest first. A parent that is gone ends the list.
    pub fn ancestors(&self, manifest: &Manifest) -> Vec<Tag> {
        let tags = self.tags();
        let mut chain = Vec::new();
        let mut parent = manifest.parent.clone();
        while let Some(next) = parent {
            let Some(Entry::Whole(found)) = tags.get(&next.tag) else {
                break;
            };
            if found.digest() != next.digest || chain.len() >= MAX_CHAIN {
                break;
            }
            chain.push(next.tag);
            parent = found.parent.clone();
        }
        chain.reverse();
        chain
    }

    fn check_chain(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let depth = self.ancestors(manifest).len();
        if depth >= MAX_CHAIN {
            return Err(StoreError::ChainTooLong {
                tag: manifest.tag.clone(),
                depth: depth + 1,
                limit: MAX_CHAIN,
            });
        }
        Ok(())
    }

    fn check_blobs(&self, manifest: &Manifest) -> Result<(), StoreError> {
        for blob in manifest.blobs() {
            let problem = match blobs::stat(&self.layout, &blob.digest)? {
                None => "which is missing",
                Some(sizes) if sizes.logical != blob.bytes => "which has another size",
                Some(_) => continue,
            };
            return Err(StoreError::Blob {
                tag: manifest.tag.clone(),
                digest: blob.digest,
                problem,
            });
        }
        Ok(())
    }

    /// Reads every tag from disk.
    fn load(&self) -> Result<(), StoreError> {
        let dir = self.layout.snapshots();
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(&dir).map_err(io_error("read", &dir))? {
            let name = entry.map_err(io_error("read", &dir))?.file_name();
            let Some(tag) = name.to_str().and_then(|name| name.parse::<Tag>().ok()) else {
                continue;
            };
            let checked = read_manifest(&self.layout, &tag)
                .and_then(|manifest| self.check_blobs(&manifest).map(|()| manifest));
            let entry = match checked {
                Ok(manifest) => {
                    lock(&self.durable).extend(manifest.digests());
                    Entry::Whole(Arc::new(manifest))
                }
                Err(error) => Entry::Broken {
                    tag: tag.clone(),
                    problem: chain(&error),
                },
            };
            found.insert(tag, entry);
        }
        *self.tags_mut() = found;
        Ok(())
    }

    /// Marks a tag as broken, for what a check finds. The caller holds the commit lock and knows that the tag is there.
    pub(crate) fn mark_broken(&self, tag: &Tag, problem: String) {
        self.tags_mut().insert(
            tag.clone(),
            Entry::Broken {
                tag: tag.clone(),
                problem,
            },
        );
    }

    pub(crate) fn commit(&self) -> MutexGuard<'_, ()> {
        lock(&self.commit)
    }

    fn tags(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<Tag, Entry>> {
        self.tags.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn tags_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<Tag, Entry>> {
        self.tags.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A point at which the process could die; tests make it.
    #[cfg(test)]
    fn step(&self) -> Result<(), StoreError> {
        self.fuse.step()
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps)]
    fn step(&self) -> Result<(), StoreError> {
        Ok(())
    }

    #[cfg(test)]
    fn is_dead(&self) -> bool {
        self.fuse.is_blown()
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    fn is_dead(&self) -> bool {
        false
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

pub(crate) fn read_manifest(layout: &Layout, tag: &Tag) -> Result<Manifest, StoreError> {
    let refuse = |source| StoreError::Manifest {
        tag: tag.clone(),
        source,
    };
    let dir = layout.snapshot(tag);
    let bytes = read_small(&dir.join(MANIFEST)).map_err(refuse)?;
    let sum = read_small(&dir.join(CHECKSUM)).map_err(refuse)?;
    let found = Digest(*blake3::hash(&bytes).as_bytes());
    if sum != format!("{found}\n").as_bytes() {
        return Err(refuse(ManifestError::OutOfRange { what: "checksum" }));
    }
    Manifest::parse(tag, &bytes).map_err(refuse)
}

fn read_small(path: &Path) -> Result<Vec<u8>, ManifestError> {
    let file = File::open(path).map_err(ManifestError::Read)?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(ManifestError::Read)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(ManifestError::TooLarge {
            bytes: bytes.len() as u64,
        });
    }
    Ok(bytes)
}

fn take_lock(layout: &Layout) -> Result<File, StoreError> {
    let path = layout.lock_file();
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(io_error("open", &path))?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| StoreError::InUse {
        path: layout.root().to_owned(),
    })?;
    Ok(file)
}

fn check_format(layout: &Layout) -> Result<(), StoreError> {
    let path = layout.format_file();
    match std::fs::read(&path) {
        Ok(bytes) => {
            let found = serde_json::from_slice::<FormatFile>(&bytes).map_or(0, |file| file.format);
            if found == FORMAT {
                Ok(())
            } else {
                Err(StoreError::Format {
                    path: layout.root().to_owned(),
                    found,
                    known: FORMAT,
                })
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let text = serde_json::to_vec(&FormatFile { format: FORMAT }).unwrap_or_default();
            let temporary = path.with_extension("new");
            let _ = std::fs::remove_file(&temporary);
            durable::write_new(&temporary, &text)?;
            std::fs::rename(&temporary, &path).map_err(io_error("create", &path))?;
            durable::sync_dir(layout.root())
        }
        Err(error) => Err(io_error("read", path)(error)),
    }
}

fn empty(dir: &Path) -> Result<(), StoreError> {
    for entry in std::fs::read_dir(dir).map_err(io_error("read", dir))? {
        let path = entry.map_err(io_error("read", dir))?.path();
        let removed = if path.is_dir() {
            std::fs::remove_dir_all(&path)
        } else {
            std::fs::remove_file(&path)
        };
        removed.map_err(io_error("remove", &path))?;
    }
    Ok(())
}
