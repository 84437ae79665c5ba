//! Artifacts are packed and unpacked: the same content, without duplicate pages, and nothing that was changed.

mod kit;

use forkd_hub::layout::{ArchiveFile, Folder, Shelf, load};
use forkd_hub::manifest::Role;
use forkd_hub::pack::Base;
use forkd_hub::{HubError, Kind};
use kit::{Content, machine, make, stream, unpack_all};
use proptest::prelude::*;

#[test]
fn an_artifact_has_every_page_once_and_comes_back_whole() {
    let folder = tempfile::tempdir().unwrap();
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), folder.path());
    assert_eq!(made.pages, 300 + 200 + 2);
    // Half of the memory is on the disk already.
    assert_eq!(made.documents.index.pages(), 300 + 100 + 2);
    let roles: Vec<Role> = made
        .documents
        .index
        .packs
        .iter()
        .map(|pack| pack.role)
        .collect();
    assert_eq!(roles, [Role::Disk, Role::Memory]);
    assert_eq!(unpack_all(&stream(&made, |_| true), &[]).unwrap().len(), 3);
}

#[test]
fn the_same_machine_is_the_same_artifact() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [disk, memory, state] = machine(1);
    let first = make([&disk, &memory, &state], &Base::default(), one.path());
    let second = make([&disk, &memory, &state], &Base::default(), two.path());
    assert_eq!(
        first.documents.artifact.digest,
        second.documents.artifact.digest
    );
}

#[test]
fn the_next_version_sends_only_pages_that_are_new() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [disk, memory, state] = machine(1);
    let first = make([&disk, &memory, &state], &Base::default(), one.path());
    let [_, memory2, state2] = machine(2);
    let next = make(
        [&disk, &memory2, &state2],
        &first.documents.base(),
        two.path(),
    );
    // The packs of the first version stay; one new pack has the pages that changed.
    assert_eq!(next.packs.len(), 1);
    assert!(next.packs[0].bytes < 110 * 4096, "{}", next.packs[0].bytes);
    assert_eq!(
        next.documents.artifact.packs.len(),
        2,
        "the old memory pack is of no use"
    );
    let sent = stream(&next, |_| true);
    // A host with the first version needs nothing but the new pack.
    unpack_all(&sent, &[&disk, &memory, &state]).unwrap();
    // A host without it is told which pack is missing.
    let error = unpack_all(&sent, &[]).unwrap_err();
    assert!(matches!(error, HubError::MissingPack { .. }), "{error}");
    // Nothing new: no pack at all.
    let three = tempfile::tempdir().unwrap();
    let same = make(
        [&disk, &memory2, &state2],
        &next.documents.base(),
        three.path(),
    );
    assert!(same.packs.is_empty());
    assert_eq!(
        same.documents.artifact.digest,
        next.documents.artifact.digest
    );
}

#[test]
fn every_damaged_byte_of_a_stream_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), folder.path());
    let good = stream(&made, |_| true);
    for at in (0..good.len() - 1024).step_by(good.len() / 600) {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        let result = std::panic::catch_unwind(|| unpack_all(&bad, &[]));
        // Padding between entries is of no meaning; all other bytes are covered by a digest.
        if let Ok(made) = result.expect("no panic") {
            assert_eq!(
                (made.len(), good[at]),
                (3, 0),
                "the changed byte {at} was not found"
            );
        }
    }
}

#[test]
fn a_stream_that_ends_early_is_refused_wherever_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), folder.path());
    let good = stream(&made, |_| true);
    for at in (0..good.len() - 1024).step_by(good.len() / 400) {
        assert!(
            unpack_all(&good[..at], &[]).is_err(),
            "{at} of {}",
            good.len()
        );
    }
}

#[test]
fn a_pack_that_is_sent_twice_or_never_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), folder.path());
    let error = unpack_all(&stream(&made, |number| number == 0), &[]).unwrap_err();
    assert!(matches!(error, HubError::MissingPack { .. }), "{error}");
    let mut twice = stream(&made, |_| true);
    let head = 512 + made.packs[1].bytes.next_multiple_of(512) as usize;
    let from = twice.len() - 1024 - head;
    let again = twice[from..from + head].to_vec();
    twice.splice(from..from, again);
    let error = unpack_all(&twice, &[]).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid, "{error}");
}

#[test]
fn folders_and_files_hold_the_same_artifact() {
    let (folder, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), folder.path());
    let layout = place.path().join("layout");
    let shelf = Folder::create(&layout).unwrap();
    for (digest, bytes) in made.documents.blobs() {
        let blob = forkd_hub::manifest::Descriptor::new("", digest, bytes.len() as u64);
        shelf
            .put(&blob, &|| Ok(Box::new(std::io::Cursor::new(bytes.clone()))))
            .unwrap();
        assert!(shelf.has(&blob).unwrap());
    }
    for (pack, blob) in made.packs.iter().zip(&made.documents.artifact.packs) {
        let damaged = || Ok(Box::new(&b"short"[..]) as Box<dyn std::io::Read + Send>);
        assert!(shelf.put(blob, &damaged).is_err());
        assert!(!shelf.has(blob).unwrap());
        shelf
            .put(blob, &|| Ok(Box::new(std::fs::File::open(&pack.path)?)))
            .unwrap();
    }
    shelf.publish("py", &made.documents).unwrap();
    shelf.publish("py", &made.documents).unwrap();
    let read = load(&Folder::open(&layout).unwrap(), None).unwrap();
    assert_eq!(read.artifact.digest, made.documents.artifact.digest);
    assert!(read.hashes.is_some());
    let file = place.path().join("py.forkd");
    std::fs::write(&file, stream(&made, |_| true)).unwrap();
    let archive = ArchiveFile::open(&file).unwrap();
    let read = load(&archive, Some("py")).unwrap();
    assert_eq!(read.artifact.digest, made.documents.artifact.digest);
    let error = load(&archive, Some("other")).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound, "{error}");
    // No draft is left behind.
    let drafts = |dir: &std::path::Path| {
        let entries = std::fs::read_dir(dir).unwrap().flatten();
        entries
            .filter(|e| e.file_name().to_string_lossy().ends_with(".part"))
            .count()
    };
    assert_eq!(drafts(&layout.join("blobs/sha256")) + drafts(&layout), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_content_comes_back(
        disk in prop::collection::btree_map(0u64..900, 0u64..40, 0..120),
        memory in prop::collection::btree_map(0u64..256, 0u64..60, 0..120),
        tail in 1u64..9000,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let disk = Content::new(disk, 900 * 4096);
        let memory = Content::new(memory, 1 << 20);
        let state = Content::new([(0, 5)], tail);
        let made = make([&disk, &memory, &state], &Base::default(), folder.path());
        unpack_all(&stream(&made, |_| true), &[]).unwrap();
    }
}
