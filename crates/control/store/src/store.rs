//! The store as one value, and its locks.
//!
//! Lock order, outermost first: `commit`, `tags`, `blobs`, `hashed`, `volatile`, the table inside [`Leases`]. A thread that holds
//! one of them takes only locks that stand after it. Only `commit` is held across I/O.

use std::collections::BTreeMap;
use std::fs::File;

use forkd_types::{Digest, Tag};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::blobs::BlobTable;
use crate::durable::Syncer;
use crate::error::StoreError;
use crate::hashed::Hashed;
use crate::layout::Layout;
use crate::lease::{Lease, Leases};
use crate::staging::Staging;
use crate::tags::Entry;
use crate::volatile::VolatileTable;
use crate::{durable, format};

/// Snapshots on disk.
#[derive(Debug)]
pub struct Store {
    pub(crate) layout: Layout,
    pub(crate) leases: Leases,
    tags: RwLock<BTreeMap<Tag, Entry>>,
    /// Held while names of blobs and tags change: a collection must not see a blob between its arrival and its first
    /// lease.
    commit: Mutex<()>,
    pub(crate) hashed: Mutex<Hashed>,
    pub(crate) blobs: Mutex<BlobTable>,
    pub(crate) volatile: Mutex<VolatileTable>,
    pub(crate) syncer: Syncer,
    /// Bytes on disk above which no further tag is made.
    limit: Option<u64>,
    /// An exclusive lock that keeps a second daemon out.
    _lock: File,
    #[cfg(test)]
    pub(crate) fuse: crate::crash_tests::Fuse,
}

impl Store {
    /// Opens a store, or creates one. Removes unfinished files of an earlier daemon. Blobs are not collected until
    /// [`Store::collect`] is called, so that the caller can take its leases first.
    pub fn open(root: impl Into<std::path::PathBuf>) -> Result<Self, StoreError> {
        let layout = Layout::new(root);
        for dir in layout.directories() {
            durable::make_dirs(&dir)?;
        }
        let lock = format::take_lock(&layout)?;
        format::check_format(&layout)?;
        format::empty(&layout.staging())?;
        let store = Self {
            syncer: Syncer::open(layout.root())?,
            layout,
            leases: Leases::default(),
            tags: RwLock::default(),
            commit: Mutex::default(),
            hashed: Mutex::default(),
            blobs: Mutex::default(),
            volatile: Mutex::default(),
            limit: None,
            _lock: lock,
            #[cfg(test)]
            fuse: crate::crash_tests::Fuse::default(),
        };
        store.blobs.lock().reload(&store.layout, 0)?;
        store.load()?;
        Ok(store)
    }

    /// Refuses new tags when blobs take more than this on disk.
    #[must_use]
    pub fn with_limit(mut self, bytes: Option<u64>) -> Self {
        self.limit = bytes;
        self
    }

    /// Bytes on disk that all blobs together may take.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// The paths of the store.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Creates a directory for unfinished files, on the file system of the store.
    pub fn stage(&self) -> Result<Staging, StoreError> {
        Staging::new(&self.layout.staging())
    }

    /// Keeps these blobs for as long as the lease lives.
    pub fn hold(&self, digests: impl IntoIterator<Item = Digest>) -> Lease {
        self.leases.hold(digests)
    }

    pub(crate) fn commit(&self) -> MutexGuard<'_, ()> {
        self.commit.lock()
    }

    pub(crate) fn tags(&self) -> RwLockReadGuard<'_, BTreeMap<Tag, Entry>> {
        self.tags.read()
    }

    pub(crate) fn tags_mut(&self) -> RwLockWriteGuard<'_, BTreeMap<Tag, Entry>> {
        self.tags.write()
    }

    /// A point at which tests let the process die.
    #[cfg(test)]
    pub(crate) fn step(&self) -> Result<(), StoreError> {
        self.fuse.step()
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps)]
    pub(crate) fn step(&self) -> Result<(), StoreError> {
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn is_dead(&self) -> bool {
        self.fuse.is_blown()
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    pub(crate) fn is_dead(&self) -> bool {
        false
    }
}
