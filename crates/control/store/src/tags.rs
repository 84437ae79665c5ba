//! Tags: publishing, finding and removing them.
//!
//! A tag becomes visible by one rename of a complete, synced directory. The order of a publish is: manifest and checksum
//! written, the file system synced with all content and names in it, rename, `snapshots/` synced. That is two waits for
//! the disk, and no lock that other requests need is held across them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use forkd_types::{Digest, Tag, chain, path_error};

use crate::error::StoreError;
use crate::layout::Layout;
use crate::lease::Lease;
use crate::manifest::{MAX_BYTES, Manifest, ManifestError};
use crate::staging::Staging;
use crate::store::Store;
use crate::{blobs, durable};

const MANIFEST: &str = "manifest.json";
const CHECKSUM: &str = "manifest.b3";

/// A tag on disk.
#[derive(Debug, Clone)]
pub enum Entry {
    /// The manifest is valid and every blob is there.
    Whole(Arc<Manifest>),
    /// The manifest cannot be used, or a blob is missing or damaged.
    Broken {
        tag: Tag,
        /// The error and its causes in one line.
        problem: String,
    },
}

impl Entry {
    pub fn tag(&self) -> &Tag {
        match self {
            Self::Whole(manifest) => &manifest.tag,
            Self::Broken { tag, .. } => tag,
        }
    }
}

/// Treatment of tags that build on the one to delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deletion {
    /// Refuse the deletion if there are any.
    Single,
    /// Delete them as well.
    Cascade,
    /// Keep them. They keep working: their manifests name every blob they need.
    Force,
}

/// A manifest with a lease on its blobs.
#[derive(Debug)]
pub struct Published {
    pub manifest: Arc<Manifest>,
    /// Keeps the blobs of the manifest.
    pub lease: Lease,
}

/// Whether a manifest may name volatile content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Volatile {
    Allowed,
    Refused,
}

impl Store {
    /// Makes a tag visible. Every blob it names must be in the store and leased by the caller.
    pub fn publish(&self, manifest: Manifest) -> Result<Published, StoreError> {
        let tag = manifest.tag.clone();
        self.check_chain(&manifest)?;
        Manifest::parse(&tag, &manifest.to_bytes()).map_err(|source| StoreError::Manifest {
            tag: tag.clone(),
            source,
        })?;
        let staging = self.stage()?;
        let result = self.write_tag(&staging, manifest);
        if self.is_dead() || !staging.path().exists() {
            staging.forget();
        }
        result
    }

    /// Leases the blobs of a manifest without making a tag, for children that start at once. Nothing is synced; the blobs
    /// live as long as the lease.
    pub fn unnamed(&self, manifest: Manifest) -> Result<Published, StoreError> {
        let _commit = self.commit();
        self.check_content(&manifest, Volatile::Allowed)?;
        Ok(self.leased(Arc::new(manifest)))
    }

    /// Makes the blobs of a manifest durable, and with them the manifest and its name in the staging directory, by one
    /// call that syncs the file system.
    fn make_durable(&self, manifest: &Manifest, written: u64) -> Result<(), StoreError> {
        self.sync_blobs(manifest.digests(), written)
    }

    fn sync_blobs(
        &self,
        digests: impl IntoIterator<Item = Digest>,
        written: u64,
    ) -> Result<(), StoreError> {
        let (fresh, oldest) = {
            let blobs = self.blobs.lock();
            let digests = digests.into_iter();
            let fresh: Vec<Digest> = digests.filter(|digest| !blobs.is_durable(digest)).collect();
            let epochs = fresh.iter().filter_map(|digest| blobs.epoch(digest));
            let oldest = epochs.chain([written]).min().unwrap_or(written);
            (fresh, oldest)
        };
        self.syncer
            .sync(oldest)
            .map_err(path_error("sync", self.layout.root()))?;
        for digest in fresh {
            let sizes = blobs::stat(&self.layout, &digest)?;
            self.blobs.lock().set_synced(&digest, sizes);
        }
        Ok(())
    }

    /// Makes blobs durable that no tag names, such as those of a volume. The caller has a lease on them.
    pub fn sync(&self, digests: impl IntoIterator<Item = Digest>) -> Result<(), StoreError> {
        self.sync_blobs(digests, self.syncer.epoch())
    }

    fn leased(&self, manifest: Arc<Manifest>) -> Published {
        let lease = self.leases.hold(manifest.digests());
        Published { manifest, lease }
    }

    fn write_tag(&self, staging: &Staging, manifest: Manifest) -> Result<Published, StoreError> {
        let bytes = manifest.to_bytes();
        let epoch = self.syncer.epoch();
        durable::write_unsynced(&staging.file(MANIFEST), &bytes)?;
        self.step()?;
        let sum = format!("{}\n", manifest.digest());
        durable::write_unsynced(&staging.file(CHECKSUM), sum.as_bytes())?;
        self.step()?;
        self.make_durable(&manifest, epoch)?;
        self.step()?;
        let commit = self.commit();
        self.check_blobs(&manifest)?;
        let target = self.layout.snapshot(&manifest.tag);
        match durable::rename_new(staging.path(), &target) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(StoreError::Exists { tag: manifest.tag });
            }
            other => other.map_err(path_error("rename to", &target))?,
        }
        let published = self.leased(Arc::new(manifest));
        let manifest = Arc::clone(&published.manifest);
        self.tags_mut()
            .insert(manifest.tag.clone(), Entry::Whole(manifest));
        drop(commit);
        self.step()?;
        // The tag is visible from the rename on. If this fails it stays in the map, so that its blobs stay too: after a
        // power cut it is either gone or whole, but never without its content.
        self.sync_snapshots()?;
        self.step()?;
        Ok(published)
    }

    fn sync_snapshots(&self) -> Result<(), StoreError> {
        #[cfg(test)]
        self.fuse.sync()?;
        Ok(durable::sync_dir(&self.layout.snapshots())?)
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

    /// Whether there is a tag of that name, damaged or not.
    pub fn contains(&self, tag: &Tag) -> bool {
        self.tags().contains_key(tag)
    }

    /// Every tag, in order.
    pub fn list(&self) -> Vec<Entry> {
        self.tags().values().cloned().collect()
    }

    /// Removes a tag. Its blobs go with the next collection, unless another tag or a lease needs them. Returns the tags
    /// that were removed, in order.
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
            other => other.map_err(path_error("remove", &from))?,
        }
        self.step()?;
        self.sync_snapshots()?;
        self.tags_mut().remove(tag);
        self.leases.note_freed();
        self.step()?;
        if trash.exists() {
            std::fs::remove_dir_all(&trash).map_err(path_error("remove", &trash))?;
        }
        Ok(())
    }

    /// Checks the content of a tag: a tag names blobs alone.
    fn check_blobs(&self, manifest: &Manifest) -> Result<(), StoreError> {
        self.check_content(manifest, Volatile::Refused)
    }

    fn check_content(&self, manifest: &Manifest, volatile: Volatile) -> Result<(), StoreError> {
        for blob in manifest.blobs() {
            let mut found = None;
            if volatile == Volatile::Allowed {
                found = self.volatile_sizes(&blob.digest);
            }
            if found.is_none() {
                found = blobs::stat(&self.layout, &blob.digest)?;
            }
            let problem = match found {
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
    pub(crate) fn load(&self) -> Result<(), StoreError> {
        let dir = self.layout.snapshots();
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(&dir).map_err(path_error("read", &dir))? {
            let name = entry.map_err(path_error("read", &dir))?.file_name();
            let Some(tag) = name.to_str().and_then(|name| name.parse::<Tag>().ok()) else {
                continue;
            };
            let checked = read_manifest(&self.layout, &tag)
                .and_then(|manifest| self.check_blobs(&manifest).map(|()| manifest));
            let entry = match checked {
                Ok(manifest) => {
                    let mut blobs = self.blobs.lock();
                    for digest in manifest.digests() {
                        blobs.set_durable(&digest);
                    }
                    drop(blobs);
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

    /// Marks a tag as damaged. The caller holds the commit lock and has seen that the tag exists.
    pub(crate) fn mark_broken(&self, tag: &Tag, problem: String) {
        self.tags_mut().insert(
            tag.clone(),
            Entry::Broken {
                tag: tag.clone(),
                problem,
            },
        );
    }
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
