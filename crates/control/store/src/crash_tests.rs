//! The state on disk after the process dies at any step.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use forkd_types::{Tag, path_error};
use proptest::prelude::*;

use crate::error::StoreError;
use crate::manifest::tests::example;
use crate::{Deletion, Entry, Parent, Store};

/// Counts steps down and then fails every one, as a process does that is no longer there.
#[derive(Debug)]
pub struct Fuse {
    steps: AtomicI64,
    /// The directory of tags cannot be synced.
    pub fails_to_sync: AtomicBool,
}

impl Default for Fuse {
    fn default() -> Self {
        Self {
            steps: AtomicI64::new(i64::MAX),
            fails_to_sync: AtomicBool::new(false),
        }
    }
}

impl Fuse {
    pub fn set(&self, steps: i64) {
        self.steps.store(steps, Ordering::Relaxed);
    }

    pub fn is_blown(&self) -> bool {
        self.steps.load(Ordering::Relaxed) <= 0
    }

    pub fn sync(&self) -> Result<(), StoreError> {
        if self.fails_to_sync.load(Ordering::Relaxed) {
            return Err(path_error("sync", "snapshots")(io::Error::other("bad disk")).into());
        }
        Ok(())
    }

    pub fn step(&self) -> Result<(), StoreError> {
        if self.steps.fetch_sub(1, Ordering::Relaxed) <= 1 {
            self.steps.store(0, Ordering::Relaxed);
            return Err(path_error("live on at", "this step")(io::Error::other("dead")).into());
        }
        Ok(())
    }
}

/// Makes a tag whose memory is filled with `fill`, as the daemon does it.
fn make(store: &Store, tag: &str, fill: u8, parent: Option<&str>) -> Result<(), StoreError> {
    let staging = store.stage()?;
    let result = (|| {
        let write = |name: &str, len: u64, byte: u8| {
            let file = File::create(staging.file(name)).unwrap();
            file.set_len(len).unwrap();
            file.write_all_at(&[byte; 4096], 0).unwrap();
        };
        write("state", 10_000, fill);
        write("memory", 1 << 20, fill);
        write("layer", 8192, 7);
        write("base", 65536, 9);
        let mut manifest = example(tag);
        let state = store.ingest(&staging.file("state"))?;
        let memory = store.ingest(&staging.file("memory"))?;
        let layer = store.ingest(&staging.file("layer"))?;
        let base = store.ingest(&staging.file("base"))?;
        manifest.state = state.blob;
        manifest.memory.layers = vec![memory.blob];
        manifest.disks[0].layers = vec![layer.blob];
        manifest.disks[0].base = base.blob;
        manifest.parent = match parent {
            Some(parent) => {
                let parent: Tag = parent.parse().unwrap();
                let digest = store.manifest(&parent)?.digest();
                Some(Parent {
                    tag: parent,
                    digest,
                })
            }
            None => None,
        };
        store.publish(manifest).map(drop)
    })();
    if store.fuse.is_blown() {
        staging.forget();
    }
    result
}

fn tags(store: &Store) -> Vec<String> {
    store
        .list()
        .iter()
        .map(|entry| entry.tag().to_string())
        .collect()
}

#[derive(Debug, Clone)]
enum Op {
    Make {
        tag: u8,
        fill: u8,
        parent: Option<u8>,
    },
    Delete {
        tag: u8,
        cascade: bool,
        force: bool,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0u8..5, 0u8..3, prop::option::of(0u8..5)).prop_map(|(tag, fill, parent)| Op::Make {
            tag,
            fill: fill + 1,
            parent
        }),
        (0u8..5, any::<bool>(), any::<bool>()).prop_map(|(tag, cascade, force)| Op::Delete {
            tag,
            cascade,
            force
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_tag_is_whole_or_not_there(ops in prop::collection::vec((op(), 1i64..30), 1..10)) {
        let dir = tempfile::tempdir().unwrap();
        // What was acknowledged, with the fill byte of its memory.
        let mut acknowledged: BTreeMap<String, u8> = BTreeMap::new();
        for (op, steps) in ops {
            let store = Store::open(dir.path()).unwrap();
            store.collect().unwrap();
            let before = tags(&store);
            store.fuse.set(steps);
            let mut unsure: Vec<String> = Vec::new();
            match op {
                Op::Make { tag, fill, parent } => {
                    let name = format!("t{tag}");
                    let parent = parent.map(|p| format!("t{p}")).filter(|p| before.contains(p) && *p != name);
                    match make(&store, &name, fill, parent.as_deref()) {
                        Ok(()) => {
                            prop_assert!(!before.contains(&name));
                            acknowledged.insert(name, fill);
                        }
                        Err(StoreError::Exists { .. }) => prop_assert!(before.contains(&name)),
                        // Died: it may have become durable all the same, but then it is whole.
                        Err(_) => if !before.contains(&name) { unsure.push(name) },
                    }
                }
                Op::Delete { tag, cascade, force } => {
                    let name = format!("t{tag}");
                    let how = if cascade { Deletion::Cascade } else if force { Deletion::Force } else { Deletion::Single };
                    match store.delete(&name.parse().unwrap(), how) {
                        Ok(gone) => for tag in gone { acknowledged.remove(tag.as_str()); },
                        Err(StoreError::NotFound { .. }) => prop_assert!(!before.contains(&name)),
                        Err(StoreError::HasDependents { .. }) => prop_assert!(how == Deletion::Single),
                        Err(_) => unsure.extend(before.iter().cloned()),
                    }
                }
            }
            drop(store);
            let store = Store::open(dir.path()).unwrap();
            store.collect().unwrap();
            let findings = store.fsck(true).unwrap();
            prop_assert_eq!(&findings.problems, &Vec::<String>::new());
            let now = tags(&store);
            for tag in acknowledged.keys() {
                prop_assert!(now.contains(tag) || unsure.contains(tag), "{} is lost", tag);
            }
            for tag in &now {
                prop_assert!(acknowledged.contains_key(tag) || unsure.contains(tag), "{} came from nowhere", tag);
            }
            acknowledged.retain(|tag, _| now.contains(tag));
            for tag in unsure.iter().filter(|tag| now.contains(tag)) {
                acknowledged.entry(tag.clone()).or_insert(0);
            }
            // Nothing lies around: every blob is named.
            let named: std::collections::BTreeSet<_> = store.list().iter().flat_map(|entry| match entry {
                Entry::Whole(manifest) => manifest.blobs(),
                Entry::Broken { .. } => Vec::new(),
            }).map(|blob| blob.digest).collect();
            prop_assert_eq!(crate::blobs::list(store.layout()).unwrap().len(), named.len());
            prop_assert_eq!(std::fs::read_dir(store.layout().staging()).unwrap().count(), 0);
        }
    }
}

#[test]
fn chains_leases_and_deletion() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    make(&store, "a", 1, None).unwrap();
    make(&store, "b", 2, Some("a")).unwrap();
    make(&store, "c", 3, Some("b")).unwrap();
    let (a, c): (Tag, Tag) = ("a".parse().unwrap(), "c".parse().unwrap());
    let detail = store.detail(&c).unwrap();
    assert_eq!(detail.ancestors.len(), 2);
    assert_eq!(store.detail(&a).unwrap().dependents.len(), 1);
    assert!(detail.unique < detail.physical, "the base is shared");
    assert!(matches!(
        store.delete(&a, Deletion::Single),
        Err(StoreError::HasDependents { .. })
    ));
    let held = store.get(&c).unwrap();
    assert_eq!(store.delete(&a, Deletion::Cascade).unwrap().len(), 3);
    for digest in held.lease.digests() {
        store.open_blob(digest).unwrap();
    }
    drop(held);
    store.collect().unwrap();
    assert_eq!(store.usage().unwrap().blobs, 0);
}

#[test]
fn damage_is_found_and_the_tag_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    make(&store, "a", 1, None).unwrap();
    let tag: Tag = "a".parse().unwrap();
    let memory = store.manifest(&tag).unwrap().memory.layers[0];
    let path = store.layout().blob(&memory.digest);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[77] ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
    assert!(store.fsck(false).unwrap().problems.is_empty());
    assert_eq!(store.fsck(true).unwrap().problems.len(), 1);
    assert!(matches!(store.list()[0], Entry::Broken { .. }));
}

#[test]
fn a_check_does_not_bring_a_deleted_tag_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    make(&store, "a", 1, None).unwrap();
    let listed = store.list();
    let tag = listed[0].tag();
    store.delete(tag, Deletion::Single).unwrap();
    assert_eq!(store.check(tag, &BTreeMap::new()), None);
    assert!(!store.contains(tag));
    // A tag that cannot be read would keep everything from being collected.
    make(&store, "b", 2, None).unwrap();
    store
        .delete(&"b".parse().unwrap(), Deletion::Single)
        .unwrap();
    store.collect_freed().unwrap();
    assert_eq!(store.usage().unwrap().blobs, 0);
}

#[test]
fn a_flipped_byte_anywhere_in_the_manifest_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    {
        let store = Store::open(dir.path()).unwrap();
        make(&store, "a", 1, None).unwrap();
    }
    let path = dir.path().join("snapshots/a/manifest.json");
    let good = std::fs::read(&path).unwrap();
    for at in (0..good.len()).step_by(7) {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        let store = Store::open(dir.path()).unwrap();
        assert!(matches!(store.list()[0], Entry::Broken { .. }), "byte {at}");
        // And what it may name is not collected.
        store.collect().unwrap();
        assert!(store.usage().unwrap().blobs > 0);
    }
}

/// Content without a tag is collected when its last lease ends.
#[test]
fn content_without_a_name_goes_with_its_lease() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    make(&store, "a", 1, None).unwrap();
    let named = store.usage().unwrap().blobs;
    let staging = store.stage().unwrap();
    std::fs::write(staging.file("memory"), vec![8; 1 << 20]).unwrap();
    let memory = store.ingest(&staging.file("memory")).unwrap();
    let mut manifest = (*store.manifest(&"a".parse().unwrap()).unwrap()).clone();
    manifest.tag = "b".parse().unwrap();
    manifest.memory.layers = vec![memory.blob];
    let unnamed = store.unnamed(manifest).unwrap();
    drop(memory);
    store.collect_freed().unwrap();
    assert_eq!(tags(&store), ["a"]);
    assert_eq!(store.usage().unwrap().blobs, named + 1);
    drop(unnamed);
    store.collect_freed().unwrap();
    assert_eq!(store.usage().unwrap().blobs, named);
    assert!(store.fsck(true).unwrap().problems.is_empty());
}

/// After a power cut a blob that no tag names may hold anything. Its name is no proof of its content.
#[test]
fn a_blob_that_was_never_durable_is_not_trusted() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let staging = store.stage().unwrap();
    std::fs::write(staging.file("memory"), vec![8; 1 << 20]).unwrap();
    let digest = {
        let written = store.ingest(&staging.file("memory")).unwrap();
        written.blob.digest
    };
    // Only one name of the file: the other is what is left of it.
    std::fs::remove_file(store.layout().blob(&digest)).unwrap();
    std::fs::write(store.layout().blob(&digest), vec![0; 1 << 20]).unwrap();
    let again = store.ingest(&staging.file("memory")).unwrap();
    assert_eq!(again.blob.digest, digest);
    let found = std::fs::read(store.layout().blob(&digest)).unwrap();
    assert_eq!(found, vec![8; 1 << 20]);
}

#[test]
fn a_store_above_its_limit_says_so_until_something_is_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    make(&store, "a", 1, None).unwrap();
    let used = store.usage().unwrap().physical;
    drop(store);
    let store = Store::open(dir.path()).unwrap().with_limit(Some(used));
    store.check_limit().unwrap();
    make(&store, "b", 2, None).unwrap();
    assert!(matches!(
        store.check_limit(),
        Err(StoreError::Limit { limit, .. }) if limit == used
    ));
    assert_eq!(tags(&store), ["a", "b"]);
    store
        .delete(&"a".parse().unwrap(), Deletion::Single)
        .unwrap();
    store.check_limit().unwrap();
}

/// A deletion is cheap: the blobs go with the next collection, which also happens when space is needed.
#[test]
fn a_deletion_leaves_the_blobs_to_the_next_collection() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    make(&store, "a", 1, None).unwrap();
    let held = store.usage().unwrap();
    store
        .delete(&"a".parse().unwrap(), Deletion::Single)
        .unwrap();
    assert_eq!(store.usage().unwrap().blobs, held.blobs);
    assert_eq!(store.collect_freed().unwrap(), held.physical);
    assert_eq!(store.usage().unwrap().physical, 0);
    assert_eq!(crate::blobs::list(store.layout()).unwrap(), []);
}

/// The sum follows every change, without a look at the directory.
#[test]
fn the_running_total_is_what_the_directory_holds() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let check = |store: &Store| {
        let digests = crate::blobs::list(store.layout()).unwrap();
        let sizes = digests
            .iter()
            .map(|digest| crate::blobs::stat(store.layout(), digest).unwrap().unwrap());
        let physical: u64 = sizes.map(|sizes| sizes.physical).sum();
        let usage = store.usage().unwrap();
        assert_eq!(usage.physical, physical);
        assert_eq!(usage.blobs, digests.len() as u64);
    };
    make(&store, "a", 1, None).unwrap();
    check(&store);
    make(&store, "b", 2, Some("a")).unwrap();
    check(&store);
    store
        .delete(&"b".parse().unwrap(), Deletion::Single)
        .unwrap();
    store.collect().unwrap();
    check(&store);
    drop(store);
    check(&Store::open(dir.path()).unwrap());
}

/// A tag whose directory entry could not be synced may be on disk or not. Its content must be there in either case.
#[test]
fn a_tag_that_may_be_on_disk_keeps_its_blobs() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    store.fuse.fails_to_sync.store(true, Ordering::Relaxed);
    assert!(make(&store, "a", 1, None).is_err());
    store.fuse.fails_to_sync.store(false, Ordering::Relaxed);
    store.collect().unwrap();
    drop(store);
    let store = Store::open(dir.path()).unwrap();
    assert!(matches!(&store.list()[..], [Entry::Whole(_)]));
    assert!(store.fsck(true).unwrap().problems.is_empty());
}

#[test]
fn a_second_daemon_is_kept_out() {
    let dir = tempfile::tempdir().unwrap();
    let _store = Store::open(dir.path()).unwrap();
    assert!(matches!(
        Store::open(dir.path()),
        Err(StoreError::InUse { .. })
    ));
}

#[test]
fn a_tag_syncs_the_file_system_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let calls = || store.syncer.calls.load(Ordering::Relaxed);
    make(&store, "a", 1, None).unwrap();
    assert_eq!(
        calls(),
        1,
        "one sync of the file system; the rename is synced by its directory"
    );
    make(&store, "b", 1, None).unwrap();
    assert_eq!(calls(), 2);
}

#[test]
fn a_disk_that_failed_is_believed_only_for_what_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let held = {
        let staging = store.stage().unwrap();
        std::fs::write(staging.file("memory"), vec![5; 8192]).unwrap();
        store.ingest(&staging.file("memory")).unwrap()
    };
    store.syncer.fails.store(true, Ordering::Relaxed);
    assert!(make(&store, "a", 1, None).is_err());
    store.syncer.fails.store(false, Ordering::Relaxed);
    assert!(tags(&store).is_empty());
    // The disk may have lost this blob without a word, so no tag names it as it is.
    let mut manifest = example("b");
    manifest.state = held.blob;
    manifest.memory.layers = vec![held.blob];
    manifest.memory.index = Some(held.blob);
    manifest.disks.clear();
    assert!(store.publish(manifest.clone()).is_err());
    let inode = |store: &Store| {
        use std::os::unix::fs::MetadataExt;
        let path = store.layout().blob(&held.blob.digest);
        std::fs::metadata(path).unwrap().ino()
    };
    let before = inode(&store);
    let staging = store.stage().unwrap();
    std::fs::write(staging.file("memory"), vec![5; 8192]).unwrap();
    let again = store.ingest(&staging.file("memory")).unwrap();
    assert_eq!(again.blob, held.blob);
    assert_ne!(inode(&store), before, "the content was written again");
    store.publish(manifest).unwrap();
    make(&store, "a", 1, None).unwrap();
    assert_eq!(tags(&store), ["a", "b"]);
}
