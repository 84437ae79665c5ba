//! Removing blobs that no tag names and no lease holds.

use std::collections::BTreeSet;

use forkd_types::path_error;

use crate::blobs;
use crate::error::StoreError;
use crate::store::Store;
use crate::tags::{Entry, read_manifest};

impl Store {
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
            self.durable.lock().remove(&digest);
            let path = self.layout.blob(&digest);
            std::fs::remove_file(&path).map_err(path_error("remove", path))?;
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
}
