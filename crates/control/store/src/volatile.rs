//! Content that lives in memory, held by descriptors alone.
//!
//! A live fork gives its children a memfd in place of a blob: nothing is hashed, and nothing is synced. Manifests and
//! records name such content like any other, by a [`BlobRef`], but the name is random and not a digest of anything. The
//! store knows which names are volatile. It drops the descriptor when no lease holds the name any more.
//!
//! A tag never names volatile content: [`Store::ingest_volatile`] makes a blob of it first.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use forkd_types::{Digest, path_error};

use crate::error::StoreError;
use crate::ingest::Ingested;
use crate::manifest::BlobRef;
use crate::sparse::Sizes;
use crate::store::Store;

/// The descriptors of volatile content, by name.
#[derive(Debug, Default)]
pub struct VolatileTable(BTreeMap<Digest, Arc<File>>);

impl VolatileTable {
    pub fn get(&self, name: &Digest) -> Option<Arc<File>> {
        self.0.get(name).cloned()
    }
}

impl Store {
    /// Makes volatile content of a file that a VMM has written. See [`Store::freeze`] for what that costs.
    pub fn enter_volatile(&self, file: &File) -> Result<Ingested, StoreError> {
        let frozen = self.freeze(file)?;
        let bytes = frozen
            .metadata()
            .map_err(path_error(
                "look at a volatile file for",
                self.layout.staging(),
            ))?
            .len();
        let digest = Digest(rand::random());
        // The lease comes first: a collection must not see content between its arrival and its first lease.
        let lease = self.leases.hold([digest]);
        self.volatile.lock().0.insert(digest, Arc::new(frozen));
        Ok(Ingested {
            blob: BlobRef { digest, bytes },
            lease,
        })
    }

    /// Enters volatile content of an earlier daemon under the name it had.
    pub fn adopt_volatile(&self, name: Digest, file: File) {
        self.volatile.lock().0.insert(name, Arc::new(file));
    }

    /// Whether a name is one of volatile content.
    pub fn is_volatile(&self, name: &Digest) -> bool {
        self.volatile.lock().0.contains_key(name)
    }

    /// Another descriptor of volatile content; `None` if the name is not one of volatile content.
    pub fn open_volatile(&self, name: &Digest) -> Result<Option<File>, StoreError> {
        let file = self.volatile.lock().get(name);
        let clone = file.map(|file| file.try_clone()).transpose();
        Ok(clone.map_err(path_error(
            "reopen a volatile file for",
            self.layout.staging(),
        ))?)
    }

    /// Copies volatile content into the store, so that a tag can name it; `None` if the name is not one of volatile
    /// content. The volatile content stays for those who hold it.
    pub fn ingest_volatile(&self, name: &Digest) -> Result<Option<Ingested>, StoreError> {
        let file = self.volatile.lock().get(name);
        file.map(|file| self.ingest_file(&file)).transpose()
    }

    /// Drops the volatile content that no lease holds. Returns its names.
    pub fn drop_unheld_volatile(&self) -> Vec<Digest> {
        let mut gone = Vec::new();
        self.volatile.lock().0.retain(|name, _| {
            let held = self.leases.is_held(name);
            if !held {
                gone.push(*name);
            }
            held
        });
        gone
    }

    /// Bytes that all volatile content takes.
    pub fn volatile_bytes(&self) -> u64 {
        let table = self.volatile.lock();
        let sizes = table.0.values().filter_map(|file| sizes(file));
        sizes.map(|sizes| sizes.physical).sum()
    }

    pub(crate) fn volatile_sizes(&self, name: &Digest) -> Option<Sizes> {
        let file = self.volatile.lock().get(name)?;
        sizes(&file)
    }
}

fn sizes(file: &File) -> Option<Sizes> {
    Some(file.metadata().ok()?.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::manifest::tests::example;
    use crate::volatile_file;

    fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        (dir, store)
    }

    fn written(byte: u8) -> File {
        let file = volatile_file("memory").unwrap();
        file.write_all_at(&[byte; 4096], 0).unwrap();
        file
    }

    #[test]
    fn volatile_content_cannot_be_changed_and_goes_with_its_last_lease() {
        let (_dir, store) = store();
        let file = written(7);
        let entered = store.enter_volatile(&file).unwrap();
        assert!(
            file.write_all_at(&[8], 0).is_err(),
            "the writer can still write"
        );
        let second = store.hold([entered.blob.digest]);
        drop(entered.lease);
        assert!(store.drop_unheld_volatile().is_empty());
        assert_eq!(store.physical(&entered.blob), 4096);
        drop(second);
        assert_eq!(store.drop_unheld_volatile(), [entered.blob.digest]);
        assert!(store.open_blob(&entered.blob.digest).is_err());
        assert_eq!(store.volatile_bytes(), 0);
    }

    #[test]
    fn volatile_content_becomes_a_blob_with_the_same_bytes() {
        let (_dir, store) = store();
        let entered = store.enter_volatile(&written(3)).unwrap();
        let blob = store
            .ingest_volatile(&entered.blob.digest)
            .unwrap()
            .unwrap();
        assert_ne!(blob.blob.digest, entered.blob.digest);
        let again = store.enter_volatile(&written(3)).unwrap();
        let same = store.ingest_volatile(&again.blob.digest).unwrap().unwrap();
        assert_eq!(same.blob, blob.blob);
        let mut bytes = [0; 4096];
        let file = store.open_verified(&blob.blob).unwrap();
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [3; 4096]);
        assert!(store.ingest_volatile(&blob.blob.digest).unwrap().is_none());
    }

    #[test]
    fn a_tag_does_not_name_volatile_content() {
        let (_dir, store) = store();
        let entered = store.enter_volatile(&written(1)).unwrap();
        let mut manifest = example("a");
        manifest.state = entered.blob;
        assert!(store.publish(manifest).is_err());
        assert!(store.list().is_empty());
    }
}
