//! Digests of files that were ingested before.

use std::collections::VecDeque;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use crate::manifest::BlobRef;

/// One entry per image is plenty.
const MAX_ENTRIES: usize = 64;
/// A file whose inode changed less than this ago is not remembered. Time stamps advance in ticks of some milliseconds:
/// within one tick a file can change, or its inode number can pass to another file, without a trace.
const SETTLED: Duration = Duration::from_secs(2);

/// Device, inode, length, modification and change time.
type FileKey = (u64, u64, u64, (i64, i64), (i64, i64));

/// A bounded cache from a file as it was to its blob. The oldest entry goes first.
#[derive(Debug, Default)]
pub struct Hashed(VecDeque<(FileKey, BlobRef)>);

impl Hashed {
    pub fn get(&self, meta: &Metadata) -> Option<BlobRef> {
        let key = key(meta);
        let found = self.0.iter().find(|(known, _)| *known == key);
        found.map(|(_, blob)| *blob)
    }

    /// Remembers a blob that was read between the two looks at the file, if the content cannot have changed meanwhile.
    pub fn insert(&mut self, before: &Metadata, after: &Metadata, blob: BlobRef) {
        let content = |meta: &Metadata| {
            let (device, inode, len, modified, _) = key(meta);
            (device, inode, len, modified)
        };
        if content(before) == content(after) && settled(after, SystemTime::now()) {
            self.put(key(after), blob);
        }
    }

    fn put(&mut self, key: FileKey, blob: BlobRef) {
        self.0.retain(|(known, _)| *known != key);
        if self.0.len() >= MAX_ENTRIES {
            self.0.pop_front();
        }
        self.0.push_back((key, blob));
    }
}

fn key(meta: &Metadata) -> FileKey {
    (
        meta.dev(),
        meta.ino(),
        meta.len(),
        (meta.mtime(), meta.mtime_nsec()),
        (meta.ctime(), meta.ctime_nsec()),
    )
}

fn settled(meta: &Metadata, now: SystemTime) -> bool {
    let changed = SystemTime::UNIX_EPOCH
        + Duration::from_secs(u64::try_from(meta.ctime()).unwrap_or(u64::MAX / 4));
    now.duration_since(changed)
        .is_ok_and(|age| age > SETTLED + Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use forkd_types::Digest;

    use super::*;

    fn blob(n: u8) -> BlobRef {
        BlobRef {
            digest: Digest([n; 32]),
            bytes: 1,
        }
    }

    #[test]
    fn the_cache_is_bounded_and_forgets_the_oldest() {
        let mut cache = Hashed::default();
        let key = |inode| (1, inode, 1, (0, 0), (0, 0));
        for inode in 0..10 * MAX_ENTRIES as u64 {
            cache.put(key(inode), blob(1));
            cache.put(key(inode), blob(2));
        }
        assert_eq!(cache.0.len(), MAX_ENTRIES);
        let (newest, found) = cache.0.back().unwrap();
        assert_eq!(newest.1, 10 * MAX_ENTRIES as u64 - 1);
        assert_eq!(*found, blob(2));
    }

    #[test]
    fn a_file_that_changed_just_now_is_not_remembered() {
        let file = tempfile::tempfile().unwrap();
        let meta = file.metadata().unwrap();
        let mut cache = Hashed::default();
        cache.insert(&meta, &meta, blob(1));
        assert_eq!(cache.get(&meta), None);
        let later = SystemTime::now() + Duration::from_secs(60);
        assert!(settled(&meta, later));
    }

    #[test]
    fn a_modification_time_that_was_set_back_does_not_hide_a_change() {
        let file = tempfile::tempfile().unwrap();
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let write = |byte| {
            file.write_all_at(&[byte], 0).unwrap();
            file.set_modified(old).unwrap();
            file.metadata().unwrap()
        };
        let before = write(1);
        let mut cache = Hashed::default();
        cache.put(key(&before), blob(1));
        assert_eq!(cache.get(&before), Some(blob(1)));
        // The change time advances in ticks.
        let changed = |meta: &Metadata| (meta.ctime(), meta.ctime_nsec());
        let after = std::iter::repeat_with(|| write(2))
            .find(|after| changed(after) != changed(&before))
            .unwrap();
        assert_eq!(after.modified().unwrap(), before.modified().unwrap());
        assert_eq!(cache.get(&after), None);
    }
}
