//! Removing blobs that no tag names and no lease holds.
//!
//! A deletion and the end of a lease only note that there may be something to collect. The daemon calls
//! [`Store::collect_freed`] every few seconds, so that ending a thousand sandboxes costs one collection.

use std::collections::BTreeSet;

use forkd_types::Digest;

use crate::draft::Draft;
use crate::error::StoreError;
use crate::store::Store;
use crate::tags::{Entry, read_manifest};

impl Store {
    /// Removes blobs that no tag names and no lease holds. Returns how many bytes came free.
    pub fn collect(&self) -> Result<u64, StoreError> {
        let mut removed = Vec::new();
        let freed = self.take_unused(&mut removed);
        // Freeing the blocks of a large file takes long, and the commit lock is free again.
        for draft in removed {
            if self.is_dead() {
                draft.forget();
            }
        }
        freed
    }

    /// As [`Store::collect`], if a tag was deleted or a lease has ended since the last time.
    pub fn collect_freed(&self) -> Result<u64, StoreError> {
        if self.leases.take_freed() {
            self.collect()
        } else {
            Ok(0)
        }
    }

    /// Moves unused blobs to the staging directory.
    fn take_unused(&self, removed: &mut Vec<Draft>) -> Result<u64, StoreError> {
        let _commit = self.commit();
        let Some(named) = self.named() else {
            return Ok(0);
        };
        let mut freed = 0;
        let all = self.blobs.lock().digests();
        for digest in all {
            if named.contains(&digest) || self.leases.is_held(&digest) {
                continue;
            }
            self.step()?;
            removed.push(Draft::take(
                &self.layout.staging(),
                &self.layout.blob(&digest),
            )?);
            let sizes = self.blobs.lock().remove(&digest);
            freed += sizes.map_or(0, |sizes| sizes.physical);
        }
        Ok(freed)
    }

    /// Every digest that a tag names. `None` if a manifest cannot be read: then nothing is known to be unused.
    fn named(&self) -> Option<BTreeSet<Digest>> {
        let mut named = BTreeSet::new();
        for entry in self.tags().values() {
            match entry {
                Entry::Whole(manifest) => named.extend(manifest.digests()),
                Entry::Broken { tag, .. } => {
                    named.extend(read_manifest(&self.layout, tag).ok()?.digests());
                }
            }
        }
        Some(named)
    }
}
