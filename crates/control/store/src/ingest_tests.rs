//! A process that keeps a writable descriptor of a file cannot change the content made from it.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::{Store, StoreError, page_digest, volatile_file};

const LEN: u64 = 3 << 20;

fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    (dir, store)
}

fn fill(file: &File, byte: u8) {
    file.set_len(LEN).unwrap();
    file.write_all_at(&[byte; 8192], 4096).unwrap();
}

fn first_bytes(file: &File) -> [u8; 8192] {
    let mut bytes = [0; 8192];
    file.read_exact_at(&mut bytes, 4096).unwrap();
    bytes
}

/// The descriptor of the process that wrote a file changes the file, but not the blob.
#[test]
fn a_blob_cannot_be_changed_through_a_kept_descriptor() {
    let (_dir, store) = store();
    let staging = store.stage().unwrap();
    let kept = staging.create("memory").unwrap();
    fill(&kept, 7);
    let ingested = store.ingest(&staging.file("memory")).unwrap();
    kept.write_all_at(&[9; 8192], 4096).unwrap();
    kept.set_len(0).unwrap();
    let blob = store.open_blob(&ingested.blob.digest).unwrap();
    assert_eq!(blob.metadata().unwrap().len(), LEN);
    assert_eq!(first_bytes(&blob), [7; 8192]);
    assert_eq!(page_digest(&blob).unwrap(), ingested.blob.digest);
    assert_ne!(
        blob.metadata().unwrap().ino(),
        kept.metadata().unwrap().ino()
    );
    assert_eq!(blob.metadata().unwrap().mode() & 0o777, 0o400);
}

/// A descriptor that the store gives out cannot be used for writing.
#[test]
fn blobs_are_handed_out_read_only() {
    let (_dir, store) = store();
    let file = tempfile::tempfile().unwrap();
    fill(&file, 7);
    let ingested = store.ingest_file(&file).unwrap();
    let blob = store.open_blob(&ingested.blob.digest).unwrap();
    assert!(blob.write_all_at(b"x", 0).is_err());
    let frozen = store.freeze(&file).unwrap();
    assert!(frozen.write_all_at(b"x", 0).is_err());
}

#[test]
fn a_copy_keeps_its_holes() {
    let (_dir, store) = store();
    let file = tempfile::tempfile().unwrap();
    file.set_len(256 << 20).unwrap();
    file.write_all_at(&[1; 4096], 100 << 20).unwrap();
    let ingested = store.ingest_file(&file).unwrap();
    assert_eq!(ingested.blob.bytes, 256 << 20);
    assert!(store.physical(&ingested.blob) < 1 << 20);
}

/// The writer of a memfd that was sealed is refused; nothing is copied.
#[test]
fn frozen_memory_refuses_the_process_that_wrote_it() {
    let (_dir, store) = store();
    let kept = volatile_file("memory").unwrap();
    fill(&kept, 7);
    let frozen = store.freeze(&kept).unwrap();
    let inode = |file: &File| file.metadata().unwrap().ino();
    assert_eq!(inode(&frozen), inode(&kept));
    for refused in [
        kept.write_all_at(b"x", 0),
        kept.set_len(0),
        kept.set_len(2 * LEN),
    ] {
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
    assert_eq!(first_bytes(&frozen), [7; 8192]);
    // A second request for the same content finds it sealed.
    assert_eq!(first_bytes(&store.freeze(&kept).unwrap()), [7; 8192]);
    // A tag that needs it later names it.
    let named = store.ingest_file(&frozen).unwrap();
    assert_eq!(named.blob.digest, page_digest(&kept).unwrap());
}

/// A file on disk cannot be sealed, so that its content moves to another inode.
#[test]
fn a_frozen_disk_layer_is_not_the_file_of_the_source() {
    let (_dir, store) = store();
    let staging = store.stage().unwrap();
    let kept = staging.create("layer").unwrap();
    fill(&kept, 7);
    let frozen = store.freeze(&kept).unwrap();
    fill(&kept, 9);
    kept.set_len(0).unwrap();
    assert_eq!(first_bytes(&frozen), [7; 8192]);
    assert_eq!(frozen.metadata().unwrap().len(), LEN);
    assert_eq!(frozen.metadata().unwrap().nlink(), 0, "no name is left");
}

#[test]
fn damaged_content_is_not_opened() {
    let (_dir, store) = store();
    let file = tempfile::tempfile().unwrap();
    fill(&file, 7);
    let blob = store.ingest_file(&file).unwrap().blob;
    store.open_verified(&blob).unwrap();
    let path = store.layout().blob(&blob.digest);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[5000] ^= 1;
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, bytes).unwrap();
    assert!(matches!(
        store.open_verified(&blob),
        Err(StoreError::Damaged { digest }) if digest == blob.digest
    ));
}

/// A file of the daemon's own is linked, not copied, and keeps its name.
#[test]
fn an_own_file_shares_its_inode_with_the_blob() {
    let (_dir, store) = store();
    let staging = store.stage().unwrap();
    let path = staging.file("flat");
    fill(
        &File::options()
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap(),
        7,
    );
    let blob = store.ingest_own(&path).unwrap().blob;
    let inode = |path: &std::path::Path| std::fs::metadata(path).unwrap().ino();
    assert_eq!(inode(&path), inode(&store.layout().blob(&blob.digest)));
    assert_eq!(store.ingest_own(&path).unwrap().blob, blob);
    // Once the blob is durable the file is left alone, so that its digest can be remembered.
    store.blobs.lock().set_durable(&blob.digest);
    let changed = || {
        let meta = std::fs::metadata(&path).unwrap();
        (meta.ctime(), meta.ctime_nsec())
    };
    let before = changed();
    assert_eq!(store.ingest_own(&path).unwrap().blob, blob);
    assert_eq!(changed(), before);
    assert_eq!(
        store.ingest_copy(&File::open(&path).unwrap()).unwrap().blob,
        blob
    );
}
