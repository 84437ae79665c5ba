//! Artifacts in Debian's registry: sent once, resumed where a transfer broke, checked when they arrive.

mod kit;

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use forkd_hub::documents::{Documents, Signature};
use forkd_hub::layout::{Place, Shelf, load};
use forkd_hub::manifest::Descriptor;
use forkd_hub::pack::Base;
use forkd_hub::sign;
use forkd_hub::{HubError, Kind};
use kit::registry::{Gate, repository, serve};
use kit::{Content, Made, machine, make};

/// Bytes that an interrupted transfer may send or fetch again.
const AGAIN: u64 = 4 << 20;
/// Room for headers and documents.
const SLACK: u64 = 1 << 20;

/// Pushes as the command line does. Answers how many bytes of blobs were sent.
fn push(shelf: &dyn Shelf, made: &Made, name: &str) -> Result<u64, HubError> {
    let mut sent = 0;
    for (digest, bytes) in made.documents.blobs() {
        let blob = Descriptor::new("", digest, bytes.len() as u64);
        if !shelf.has(&blob)? {
            sent += shelf.put(&blob, &|| Ok(Box::new(std::io::Cursor::new(bytes.clone()))))?;
        }
    }
    for pack in &made.documents.artifact.packs {
        if shelf.has(pack)? {
            continue;
        }
        let found = made.packs.iter().find(|new| new.digest == pack.digest);
        let path = &found.expect("a pack that the registry lacks").path;
        sent += shelf.put(pack, &|| Ok(Box::new(File::open(path)?)))?;
    }
    shelf.publish(name, &made.documents)?;
    Ok(sent)
}

/// Fetches all packs and compares them with their digests.
fn pull(place: &dyn Place, name: &str) -> Result<Documents, HubError> {
    let documents = load(place, Some(name))?;
    for pack in &documents.artifact.packs {
        let mut bytes = Vec::new();
        place.pack(pack)?.read_to_end(&mut bytes).unwrap();
        assert_eq!(Descriptor::of("", &bytes).digest, pack.digest);
    }
    place.arrived(&documents.artifact.packs);
    Ok(documents)
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

fn big(seed: u64, folder: &Path) -> Made {
    let pages = 4096;
    let disk = Content::new((0..pages).map(|n| (n, n + seed * 1_000_000)), pages * 4096);
    let [_, memory, state] = machine(seed);
    make([&disk, &memory, &state], &Base::default(), folder)
}

#[test]
fn a_push_is_pulled_again_and_the_next_one_sends_what_is_new() {
    let (packs, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = serve();
    let shelf = repository(&server.host, cache.path());
    let [disk, memory, state] = machine(1);
    let first = make([&disk, &memory, &state], &Base::default(), packs.path());
    assert!(push(&shelf, &first, "py").unwrap() > 400 * 4096);
    assert_eq!(push(&shelf, &first, "py").unwrap(), 0, "nothing is new");
    let found = pull(&shelf, "py").unwrap();
    assert_eq!(found.artifact.digest, first.documents.artifact.digest);
    assert_eq!(files(&cache.path().join("v1/packs")), 0);
    assert_eq!(files(&cache.path().join("v1/uploads")), 0);

    // Another boot of the same machine: disk pages and half of the memory are there.
    let more = tempfile::tempdir().unwrap();
    let [_, memory, state] = machine(2);
    let second = make([&disk, &memory, &state], &found.base(), more.path());
    let sent = push(&shelf, &second, "py").unwrap();
    assert!(sent < 130 * 4096, "{sent}");
    let now = pull(&shelf, "py").unwrap();
    assert_eq!(now.artifact.digest, second.documents.artifact.digest);
    // The first one is still there by its digest.
    let pinned = first.documents.artifact.digest.to_string();
    assert_eq!(
        pull(&shelf, &pinned).unwrap().artifact.digest,
        first.documents.artifact.digest
    );
    let error = load(&shelf, Some("other")).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound);
    assert!(error.to_string().contains("py"), "{error}");
}

/// A source that breaks off after a number of bytes.
struct Broken(File, u64);

impl Read for Broken {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = buffer.len().min(self.1 as usize);
        if most == 0 {
            return Err(std::io::Error::other("the process ends here"));
        }
        let read = self.0.read(&mut buffer[..most])?;
        self.1 -= read as u64;
        Ok(read)
    }
}

/// A push that ends between two chunks is continued by another process.
#[test]
fn an_upload_goes_on_after_its_last_chunk() {
    let (server, cache) = (serve(), tempfile::tempdir().unwrap());
    let packs = tempfile::tempdir().unwrap();
    let made = big(2, packs.path());
    let (pack, file) = (&made.documents.artifact.packs[0], &made.packs[0]);
    let mut had = 0;
    for at in [3, 7, 13] {
        let shelf = repository(&server.host, cache.path());
        let content = || Ok(Box::new(Broken(File::open(&file.path)?, at << 20)) as _);
        assert!(shelf.put(pack, &content).is_err());
        had = (at << 20) / AGAIN * AGAIN;
    }
    let shelf = repository(&server.host, cache.path());
    let sent = shelf
        .put(pack, &|| Ok(Box::new(File::open(&file.path)?)))
        .unwrap();
    assert_eq!(sent, pack.size - had);
    assert!(shelf.has(pack).unwrap());
    assert_eq!(files(&cache.path().join("v1/uploads")), 0);
}

/// At many points of a push and of a pull the connection breaks for good, and another process goes on. This registry gives
/// an upload up whose chunk broke off, so only packs that were whole are not sent again.
#[test]
fn a_broken_transfer_goes_on_where_it_ended() {
    let points: u64 = std::env::var("FORKD_HUB_POINTS").map_or(2, |text| text.parse().unwrap());
    let packs = tempfile::tempdir().unwrap();
    let made = big(1, packs.path());
    let total: u64 = made
        .documents
        .artifact
        .packs
        .iter()
        .map(|pack| pack.size)
        .sum();
    assert!(total > 15 << 20);
    for point in 0..points {
        // Each point has a registry without the blobs.
        let (server, cache) = (serve(), tempfile::tempdir().unwrap());
        let gate = Gate::before(&server.host);
        let at = total * (point * 2 + 1) / (points * 2);
        gate.close_after(at);
        let broken = push(&repository(&gate.host, cache.path()), &made, "py");
        assert!(broken.is_err(), "the gate closes before the end");
        gate.open();
        assert!(load(&repository(&gate.host, cache.path()), Some("py")).is_err());
        push(&repository(&gate.host, cache.path()), &made, "py").unwrap();
        let missing = total - at;

        gate.close_after(at);
        let broken = pull(&repository(&gate.host, cache.path()), "py");
        assert!(broken.is_err(), "the gate closes before the end");
        gate.open();
        let before = gate.passed().1;
        pull(&repository(&gate.host, cache.path()), "py").unwrap();
        let fetched = gate.passed().1 - before;
        assert!(
            fetched <= missing + AGAIN + SLACK,
            "{at}: {fetched} of {missing}"
        );
        assert_eq!(files(&cache.path().join("v1/packs")), 0);
    }
}

#[test]
fn damaged_packs_are_refused_and_not_kept() {
    let (packs, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = serve();
    let shelf = repository(&server.host, cache.path());
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), packs.path());
    push(&shelf, &made, "py").unwrap();
    let pack = made.documents.artifact.packs[0].digest.hex();
    let path = server.blob(&pack);
    let good = std::fs::read(&path).unwrap();
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    std::fs::write(&path, &bad).unwrap();
    let error = pull(&shelf, "py").unwrap_err();
    assert_eq!(error.kind(), Kind::Digest, "{error}");
    std::fs::write(&path, &good[..good.len() - 100]).unwrap();
    assert!(pull(&shelf, "py").is_err());
    std::fs::write(&path, &good).unwrap();
    pull(&shelf, "py").unwrap();
    assert_eq!(files(&cache.path().join("v1/packs")), 0);
}

/// The registry has no list of referrers: the signature is found through the tag of its subject.
#[test]
fn a_signature_travels_with_its_artifact() {
    let (packs, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = serve();
    let shelf = repository(&server.host, cache.path());
    let [disk, memory, state] = machine(1);
    let mut made = make([&disk, &memory, &state], &Base::default(), packs.path());
    let key = cache.path().join("key");
    let keygen = |args: &[&str], input: &str| {
        let mut child = std::process::Command::new("ssh-keygen")
            .args(args)
            .arg(&key)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(input.as_bytes())
            .unwrap();
        child.wait_with_output().unwrap().stdout
    };
    keygen(&["-q", "-t", "ed25519", "-N", "", "-f"], "");
    let message = sign::message(&made.documents.artifact.digest);
    let text = keygen(&["-Y", "sign", "-n", sign::NAMESPACE, "-f"], &message);
    let signature = Signature::of(&made.documents.artifact, text);
    made.documents.add_signature(signature).unwrap();
    push(&shelf, &made, "py").unwrap();
    let public = std::fs::read_to_string(key.with_extension("pub")).unwrap();
    let signers = sign::Signers::parse(&format!("ann@example.org {public}")).unwrap();
    let found = pull(&shelf, "py").unwrap();
    assert_eq!(signers.check(&found).unwrap(), "ann@example.org");
    // A second push adds no second entry.
    push(&shelf, &made, "py").unwrap();
    assert_eq!(pull(&shelf, "py").unwrap().signatures.len(), 1);
}

#[test]
fn two_pulls_at_once_fetch_a_pack_once() {
    let (packs, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = serve();
    let made = big(3, packs.path());
    push(&repository(&server.host, cache.path()), &made, "py").unwrap();
    let total: u64 = made
        .documents
        .artifact
        .packs
        .iter()
        .map(|pack| pack.size)
        .sum();
    let gate = Gate::before(&server.host);
    let fetched = std::thread::scope(|scope| {
        let fetch = || {
            let place = repository(&gate.host, cache.path());
            let documents = load(&place, Some("py")).unwrap();
            for pack in &documents.artifact.packs {
                place.pack(pack).unwrap();
            }
        };
        let threads = [scope.spawn(fetch), scope.spawn(fetch)];
        for thread in threads {
            thread.join().unwrap();
        }
        gate.passed().1
    });
    assert!(fetched < total + total / 2, "{fetched} of {total}");
}

#[test]
fn a_container_image_is_named_as_one() {
    let cache = tempfile::tempdir().unwrap();
    let server = serve();
    let shelf = repository(&server.host, cache.path());
    let [disk, memory, state] = machine(1);
    let mut made = make([&disk, &memory, &state], &Base::default(), cache.path());
    let text = String::from_utf8(made.documents.artifact.bytes.clone()).unwrap();
    let image = text
        .replace(
            "vnd.forkd.snapshot.config.v1+json",
            "vnd.oci.image.config.v1+json",
        )
        .replace("application/vnd.forkd.snapshot.v1", "x/y");
    push(&shelf, &made, "py").unwrap();
    made.documents.artifact.bytes = image.into_bytes();
    shelf.publish("image", &made.documents).unwrap();
    let error = load(&shelf, Some("image")).unwrap_err();
    assert!(matches!(error, HubError::ContainerImage { .. }), "{error}");
}
