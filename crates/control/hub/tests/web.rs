//! A layout behind a web server, and a packed snapshot as one file.

mod kit;

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use forkd_hub::Kind;
use forkd_hub::layout::{ArchiveFile, Folder, Place, Shelf, load};
use forkd_hub::manifest::Descriptor;
use forkd_hub::pack::Base;
use forkd_hub::remote::{Cache, WebFolder, file};
use kit::registry::Gate;
use kit::{Made, machine, make, stream};

fn fill(folder: &std::path::Path, made: &Made) {
    let shelf = Folder::create(folder).unwrap();
    for (digest, bytes) in made.documents.blobs() {
        let blob = Descriptor::new("", digest, bytes.len() as u64);
        shelf
            .put(&blob, &|| Ok(Box::new(std::io::Cursor::new(bytes.clone()))))
            .unwrap();
    }
    for (pack, blob) in made.packs.iter().zip(&made.documents.artifact.packs) {
        shelf
            .put(blob, &|| Ok(Box::new(std::fs::File::open(&pack.path)?)))
            .unwrap();
    }
    shelf.publish("py", &made.documents).unwrap();
}

#[test]
fn a_folder_behind_a_web_server_is_read_and_checked() {
    let (packs, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), packs.path());
    fill(root.path(), &made);
    let server = kit::web::Server::start(root.path());
    let gate = Gate::before(&server.host);
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let cache = Cache::at(folder.path(), Arc::new(AtomicBool::new(false))).unwrap();
        WebFolder::open(&format!("http://{}/x", gate.host), cache).unwrap()
    };
    let place = open();
    let documents = load(&place, Some("py")).unwrap();
    assert_eq!(documents.artifact.digest, made.documents.artifact.digest);
    assert_eq!(load(&place, Some("no")).unwrap_err().kind(), Kind::NotFound);
    let pack = &documents.artifact.packs[0];
    // The connection breaks in the middle; another process goes on.
    gate.close_after(pack.size / 2);
    assert!(place.pack(pack).is_err());
    gate.open();
    let before = gate.passed().1;
    let mut bytes = Vec::new();
    open().pack(pack).unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!(Descriptor::of("", &bytes).digest, pack.digest);
    assert!(gate.passed().1 - before < pack.size * 3 / 4);
    place.arrived(&documents.artifact.packs);
    // Damage is found before any byte is passed on.
    let path = root.path().join("blobs/sha256").join(pack.digest.hex());
    let mut bad = std::fs::read(&path).unwrap();
    bad[10] ^= 1;
    std::fs::write(&path, bad).unwrap();
    assert_eq!(open().pack(pack).err().unwrap().kind(), Kind::Digest);
}

#[test]
fn one_file_is_fetched_whole() {
    let (packs, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), packs.path());
    std::fs::write(root.path().join("py.forkd"), stream(&made, |_| true)).unwrap();
    let server = kit::web::Server::start(root.path());
    let mut fetched = tempfile::NamedTempFile::new().unwrap();
    let url = format!("http://{}/x/py.forkd", server.host);
    file::fetch(&url, fetched.as_file_mut()).unwrap();
    let archive = ArchiveFile::open(fetched.path()).unwrap();
    let found = load(&archive, Some("py")).unwrap();
    assert_eq!(found.artifact.digest, made.documents.artifact.digest);
    let missing = format!("http://{}/x/none.forkd", server.host);
    let error = file::fetch(&missing, fetched.as_file_mut()).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound);
    assert!(file::fetch("ftp://x/y", fetched.as_file_mut()).is_err());
}
