//! Artifacts in an object store: `s3s-fs`, a server that checks signatures, on loopback.
//!
//! `make soak` builds the server and names it in `FORKD_S3_SERVER`.

mod kit;

use std::fs::File;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use forkd_hub::documents::Documents;
use forkd_hub::layout::{Place, Shelf, load};
use forkd_hub::manifest::Descriptor;
use forkd_hub::pack::Base;
use forkd_hub::remote::{Bucket, Cache, Keys, WebFolder};
use forkd_hub::{HubError, Kind};
use forkd_oci::auth::Secret;
use kit::registry::Gate;
use kit::{Content, Made, machine, make};

const ID: &str = "AKEXAMPLE";
const SECRET: &str = "a secret of this test";

/// A running server. It ends with this value.
struct Server {
    host: String,
    folder: tempfile::TempDir,
    child: Child,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start() -> Self {
        let program = std::env::var_os("FORKD_S3_SERVER").expect("FORKD_S3_SERVER names s3s-fs");
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("hub")).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let child = Command::new(program)
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["--access-key", ID, "--secret-key", SECRET])
            .arg(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let host = format!("127.0.0.1:{port}");
        let started = Instant::now();
        while TcpStream::connect(&host).is_err() {
            assert!(started.elapsed() < Duration::from_secs(60), "not up");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self {
            host,
            folder,
            child,
        }
    }
}

fn cache(folder: &Path) -> Cache {
    Cache::at(folder, Arc::new(AtomicBool::new(false))).unwrap()
}

fn bucket(host: &str, secret: &str, folder: &Path) -> Bucket {
    let keys = Keys {
        endpoint: format!("http://{host}"),
        region: "us-east-1".into(),
        id: ID.into(),
        secret: Secret::new(secret.into()),
        token: None,
    };
    Bucket::open("hub/team machines", keys, cache(folder)).unwrap()
}

/// Pushes as the command line does. Answers how many bytes of packs were sent.
fn push(shelf: &dyn Shelf, made: &Made) -> Result<u64, HubError> {
    for (digest, bytes) in made.documents.blobs() {
        let blob = Descriptor::new("", digest, bytes.len() as u64);
        if !shelf.has(&blob)? {
            shelf.put(&blob, &|| Ok(Box::new(std::io::Cursor::new(bytes.clone()))))?;
        }
    }
    let mut sent = 0;
    for pack in &made.documents.artifact.packs {
        if shelf.has(pack)? {
            continue;
        }
        let found = made.packs.iter().find(|new| new.digest == pack.digest);
        let path = &found.expect("a pack that the store lacks").path;
        sent += shelf.put(pack, &|| Ok(Box::new(File::open(path)?)))?;
    }
    shelf.publish("py", &made.documents)?;
    Ok(sent)
}

fn pull(place: &dyn Place) -> Result<Documents, HubError> {
    let documents = load(place, Some("py"))?;
    for pack in &documents.artifact.packs {
        let mut bytes = Vec::new();
        place.pack(pack)?.read_to_end(&mut bytes).unwrap();
        assert_eq!(Descriptor::of("", &bytes).digest, pack.digest);
    }
    place.arrived(&documents.artifact.packs);
    Ok(documents)
}

#[test]
fn a_store_keeps_artifacts_and_refuses_another_secret() {
    let (packs, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start();
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), packs.path());
    let stranger = bucket(&server.host, "another secret", folder.path());
    assert!(push(&stranger, &made).is_err());
    assert!(load(&stranger, Some("py")).is_err());
    let shelf = bucket(&server.host, SECRET, folder.path());
    let missing = load(&shelf, Some("py")).unwrap_err();
    assert_eq!(missing.kind(), Kind::NotFound, "{missing}");
    assert!(push(&shelf, &made).unwrap() > 400 * 4096);
    assert_eq!(push(&shelf, &made).unwrap(), 0, "nothing is new");
    let found = pull(&shelf).unwrap();
    assert_eq!(found.artifact.digest, made.documents.artifact.digest);
    let more = tempfile::tempdir().unwrap();
    let [_, memory, state] = machine(2);
    let second = make([&disk, &memory, &state], &found.base(), more.path());
    assert!(push(&shelf, &second).unwrap() < 130 * 4096);
    let now = pull(&shelf).unwrap();
    assert_eq!(now.artifact.digest, second.documents.artifact.digest);
}

#[test]
fn a_broken_download_goes_on_and_damage_is_found() {
    let (packs, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start();
    let pages = 4096;
    let disk = Content::new((0..pages).map(|n| (n, n + 7)), pages * 4096);
    let [_, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), packs.path());
    let total: u64 = made
        .documents
        .artifact
        .packs
        .iter()
        .map(|pack| pack.size)
        .sum();
    push(&bucket(&server.host, SECRET, folder.path()), &made).unwrap();
    let gate = Gate::before(&server.host);
    for part in 1..6 {
        let at = total * part / 6;
        gate.close_after(at);
        assert!(pull(&bucket(&gate.host, SECRET, folder.path())).is_err());
        gate.open();
        let before = gate.passed().1;
        pull(&bucket(&gate.host, SECRET, folder.path())).unwrap();
        let fetched = gate.passed().1 - before;
        assert!(fetched <= total - at + (5 << 20), "{at}: {fetched}");
    }
    let pack = made.documents.artifact.packs[0].digest.hex();
    let path = server
        .folder
        .path()
        .join("hub/team machines/blobs/sha256")
        .join(pack);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let error = pull(&bucket(&server.host, SECRET, folder.path())).unwrap_err();
    assert_eq!(error.kind(), Kind::Digest, "{error}");
}

/// The folder of a store behind a web server is a layout.
#[test]
fn the_same_folder_is_read_over_the_web() {
    let (packs, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start();
    let [disk, memory, state] = machine(1);
    let made = make([&disk, &memory, &state], &Base::default(), packs.path());
    push(&bucket(&server.host, SECRET, folder.path()), &made).unwrap();
    let root = server.folder.path().join("hub/team machines");
    let web = kit::web::Server::start(&root);
    let place = WebFolder::open(&format!("http://{}/x/", web.host), cache(folder.path())).unwrap();
    let found = pull(&place).unwrap();
    assert_eq!(found.artifact.digest, made.documents.artifact.digest);
}
