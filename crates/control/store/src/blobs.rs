//! Content by digest, and the table of what is there.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;

use forkd_types::{Digest, path_error};

use crate::digest::page_digest;
use crate::durable;
use crate::error::StoreError;
use crate::layout::Layout;
use crate::manifest::BlobRef;
use crate::sparse::Sizes;

/// Every blob with its size, and the sums. The table follows every change of the directory, so that no operation has to
/// read the directory.
#[derive(Debug, Default)]
pub struct BlobTable {
    blobs: BTreeMap<Digest, Known>,
    total: Sizes,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    sizes: Sizes,
    /// [`crate::durable::Syncer::epoch`] when the blob was written.
    epoch: u64,
    /// The blob survives a power cut. The others become durable with the first tag that names them.
    durable: bool,
}

impl BlobTable {
    /// Reads the directory. Blobs stay durable that were.
    pub fn reload(&mut self, layout: &Layout, epoch: u64) -> Result<(), StoreError> {
        let old = std::mem::take(self);
        for digest in list(layout)? {
            if let Some(sizes) = stat(layout, &digest)? {
                let epoch = old.blobs.get(&digest).map_or(epoch, |known| known.epoch);
                self.insert(digest, sizes, epoch);
                if old.is_durable(&digest) {
                    self.set_durable(&digest);
                }
            }
        }
        Ok(())
    }

    /// Enters a blob that is new or was replaced. It is not durable.
    pub fn insert(&mut self, digest: Digest, sizes: Sizes, epoch: u64) {
        self.remove(&digest);
        self.total.logical += sizes.logical;
        self.total.physical += sizes.physical;
        let durable = false;
        let known = Known {
            sizes,
            epoch,
            durable,
        };
        self.blobs.insert(digest, known);
    }

    pub fn remove(&mut self, digest: &Digest) -> Option<Sizes> {
        let known = self.blobs.remove(digest)?;
        self.total.logical -= known.sizes.logical;
        self.total.physical -= known.sizes.physical;
        Some(known.sizes)
    }

    pub fn is_durable(&self, digest: &Digest) -> bool {
        self.blobs.get(digest).is_some_and(|known| known.durable)
    }

    pub fn set_durable(&mut self, digest: &Digest) {
        if let Some(known) = self.blobs.get_mut(digest) {
            known.durable = true;
        }
    }

    /// The epoch in which a blob was written.
    pub fn epoch(&self, digest: &Digest) -> Option<u64> {
        self.blobs.get(digest).map(|known| known.epoch)
    }

    /// Blocks are often allocated when the data is written back.
    pub fn set_synced(&mut self, digest: &Digest, sizes: Option<Sizes>) {
        if let (Some(sizes), Some(epoch)) = (sizes, self.epoch(digest)) {
            self.insert(*digest, sizes, epoch);
        }
        self.set_durable(digest);
    }

    pub fn sizes(&self, digest: &Digest) -> Option<Sizes> {
        self.blobs.get(digest).map(|known| known.sizes)
    }

    /// Sums over all blobs.
    pub fn total(&self) -> Sizes {
        self.total
    }

    pub fn len(&self) -> usize {
        self.blobs.len()
    }

    /// Every digest, in order.
    pub fn digests(&self) -> Vec<Digest> {
        self.blobs.keys().copied().collect()
    }
}

/// Hashes a file.
pub fn hash(path: &Path) -> Result<BlobRef, StoreError> {
    let file = File::open(path).map_err(path_error("open", path))?;
    let digest = page_digest(&file).map_err(path_error("read", path))?;
    let bytes = file.metadata().map_err(path_error("read", path))?.len();
    Ok(BlobRef { digest, bytes })
}

/// Renames a draft to the name of its content. Nothing is durable yet. False if the blob is there already: then the
/// draft stays.
///
/// A blob that has been durable is the content its name says. Any other may be the remains of a power cut: its content
/// is compared, and the draft replaces it if it differs. A blob that may have been lost by a failing disk is replaced.
pub fn enter(
    layout: &Layout,
    draft: &Path,
    blob: &BlobRef,
    was_durable: bool,
    may_be_lost: bool,
) -> Result<bool, StoreError> {
    let name = layout.blob(&blob.digest);
    match durable::rename_new(draft, &name) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => {
            other.map_err(path_error("rename to", name))?;
            return Ok(true);
        }
    }
    if was_durable || (!may_be_lost && hash(&name)? == *blob) {
        return Ok(false);
    }
    std::fs::rename(draft, &name).map_err(path_error("rename to", name))?;
    Ok(true)
}

/// Size of a blob; `None` if there is no such blob.
pub fn stat(layout: &Layout, digest: &Digest) -> Result<Option<Sizes>, StoreError> {
    let path = layout.blob(digest);
    match std::fs::symlink_metadata(&path) {
        Ok(meta) => Ok(Some(meta.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(path_error("look at", path)(error).into()),
    }
}

/// The digest of every blob in the directory. Other names are left out.
pub fn list(layout: &Layout) -> Result<Vec<Digest>, StoreError> {
    let dir = layout.blobs();
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&dir).map_err(path_error("read", &dir))? {
        let entry = entry.map_err(path_error("read", &dir))?;
        let name = entry.file_name();
        if let Some(digest) = name
            .to_str()
            .and_then(|name| format!("b3:{name}").parse().ok())
        {
            all.push(digest);
        }
    }
    all.sort();
    Ok(all)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_total_is_the_sum(steps in prop::collection::vec((0u8..6, 0u64..100, any::<bool>()), 0..60)) {
            let mut table = BlobTable::default();
            for (name, size, insert) in steps {
                let digest = Digest([name; 32]);
                if insert {
                    table.insert(digest, Sizes { logical: 2 * size, physical: size }, 0);
                } else {
                    table.remove(&digest);
                }
                let all = table.digests();
                let sum: u64 = all.iter().filter_map(|d| table.sizes(d)).map(|s| s.physical).sum();
                prop_assert_eq!(table.total(), Sizes { logical: 2 * sum, physical: sum });
                prop_assert_eq!(table.len(), all.len());
            }
        }
    }

    #[test]
    fn a_replaced_blob_is_not_durable() {
        let mut table = BlobTable::default();
        let digest = Digest([1; 32]);
        table.insert(digest, Sizes::default(), 0);
        table.set_durable(&digest);
        assert!(table.is_durable(&digest));
        table.insert(digest, Sizes::default(), 0);
        assert!(!table.is_durable(&digest));
    }
}
