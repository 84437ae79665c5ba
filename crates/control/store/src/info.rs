//! Sizes and relations of tags, and the size of the store.

use std::sync::Arc;

use forkd_types::{Tag, path_error};

use crate::error::StoreError;
use crate::manifest::{BlobRef, Manifest};
use crate::store::Store;
use crate::tags::Entry;

/// A tag with its relations and sizes.
#[derive(Debug, Clone)]
pub struct Detail {
    pub manifest: Arc<Manifest>,
    /// Ancestors, the oldest first.
    pub ancestors: Vec<Tag>,
    /// Tags whose parent this tag is.
    pub dependents: Vec<Tag>,
    /// Bytes on disk of the newest memory layer.
    pub memory_physical: u64,
    /// Bytes on disk of the disk layers, the base image left out.
    pub disk_physical: u64,
    /// Bytes on disk of all blobs that the tag names.
    pub physical: u64,
    /// Bytes on disk of the blobs that no other tag names.
    pub unique: u64,
}

/// Size of the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Number of tags.
    pub snapshots: u64,
    /// Number of blobs.
    pub blobs: u64,
    /// Bytes that all blobs take on disk.
    pub physical: u64,
    /// Sum of the lengths of all blobs.
    pub logical: u64,
    /// Bytes free on the file system.
    pub free: u64,
}

impl Store {
    /// Relations and sizes of a tag.
    pub fn detail(&self, tag: &Tag) -> Result<Detail, StoreError> {
        let manifest = self.manifest(tag)?;
        let others: Vec<Arc<Manifest>> = self
            .list()
            .into_iter()
            .filter_map(|entry| match entry {
                Entry::Whole(other) if other.tag != *tag => Some(other),
                _ => None,
            })
            .collect();
        let shared: std::collections::BTreeSet<_> = others
            .iter()
            .flat_map(|other| other.blobs())
            .map(|blob| blob.digest)
            .collect();
        let mut physical = 0;
        let mut unique = 0;
        for blob in manifest.blobs() {
            let size = self.physical(&blob);
            physical += size;
            if !shared.contains(&blob.digest) {
                unique += size;
            }
        }
        let memory_physical = match manifest.memory.layers.last() {
            Some(layer) => self.physical(layer),
            None => 0,
        };
        let mut disk_physical = 0;
        for layer in manifest.disks.iter().flat_map(|disk| &disk.layers) {
            disk_physical += self.physical(layer);
        }
        Ok(Detail {
            ancestors: self.ancestors(&manifest),
            dependents: self.dependents(tag),
            manifest,
            memory_physical,
            disk_physical,
            physical,
            unique,
        })
    }

    /// Bytes on disk, or in memory, of a blob; 0 if there is no such blob.
    pub fn physical(&self, blob: &BlobRef) -> u64 {
        let known = self.blobs.lock().sizes(&blob.digest);
        let sizes = known.or_else(|| self.volatile_sizes(&blob.digest));
        sizes.map_or(0, |sizes| sizes.physical)
    }

    /// Refuses if blobs take more space than they may. Collects first if that may help.
    pub fn check_limit(&self) -> Result<(), StoreError> {
        if self.within_limit().is_err() {
            self.collect_freed()?;
        }
        self.within_limit()
    }

    fn within_limit(&self) -> Result<(), StoreError> {
        let used = self.blobs.lock().total().physical;
        match self.limit() {
            Some(limit) if used > limit => Err(StoreError::Limit { used, limit }),
            _ => Ok(()),
        }
    }

    /// Size of the store. Reads no directory.
    pub fn usage(&self) -> Result<Usage, StoreError> {
        let root = self.layout().root();
        let fs = rustix::fs::statvfs(root).map_err(path_error("look at", root))?;
        let snapshots = self.list().len() as u64;
        let blobs = self.blobs.lock();
        Ok(Usage {
            snapshots,
            blobs: blobs.len() as u64,
            physical: blobs.total().physical,
            logical: blobs.total().logical,
            free: fs.f_bavail.saturating_mul(fs.f_frsize),
        })
    }
}
