//! Debian's registry, on loopback: images go in over its own protocol and come out the same.

mod support;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forkd_oci::OciError;
use forkd_oci::auth::{Credential, Secret};
use forkd_oci::digest::Digest;
use forkd_oci::registries::Registries;
use forkd_oci::registry::RegistryError;
use reqwest::blocking::Client;
use support::{Example, OCI_INDEX, OCI_MANIFEST, pull, pull_with, registries};

const USER: &str = "reader";
const PASSWORD: &str = "open sesame";
/// The password as htpasswd writes it.
const HASH: &str = "$2y$05$abcdefghijklmnopqrstuupx2xBUC4954936wVIjyyPHmUBFu0wCW";

/// A running registry. It ends with this value.
struct Registry {
    host: String,
    folder: tempfile::TempDir,
    child: Child,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program: in PATH, or where `scripts/unpack-tools.sh` unpacks it.
fn program() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let cache = cache.unwrap_or_else(|| home().join(".cache"));
    let unpacked = cache.join("forkd/tools/usr/bin/docker-registry");
    if unpacked.exists() {
        return unpacked;
    }
    "docker-registry".into()
}

impl Registry {
    fn start(more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let host = format!("127.0.0.1:{port}");
        let storage = folder.path().join("storage");
        let config = format!(
            "version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '{host}'}}\n{}",
            storage.display(),
            more.replace("FOLDER", &folder.path().display().to_string())
        );
        let path = folder.path().join("config.yml");
        std::fs::write(&path, config).unwrap();
        std::fs::write(folder.path().join("htpasswd"), format!("{USER}:{HASH}\n")).unwrap();
        let child = Command::new(program())
            .arg("serve")
            .arg(&path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("Debian's docker-registry is missing: run scripts/unpack-tools.sh");
        let started = Instant::now();
        while TcpStream::connect(&host).is_err() {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "the registry does not listen"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Self {
            host,
            folder,
            child,
        }
    }

    fn with_password() -> Self {
        Self::start("auth: {htpasswd: {realm: test, path: FOLDER/htpasswd}}\n")
    }

    /// Puts an image in, as `docker push` does.
    fn push(&self, example: &Example) {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let http = Client::builder()
            .no_proxy()
            .tls_certs_only([])
            .build()
            .unwrap();
        let url = |path: &str| format!("http://{}/v2/team/app/{path}", self.host);
        for blob in example.layers.iter().chain([&example.config]) {
            let begun = http
                .post(url("blobs/uploads/"))
                .basic_auth(USER, Some(PASSWORD))
                .send()
                .unwrap();
            let to = begun.headers()["location"].to_str().unwrap().to_owned();
            let to = if to.starts_with('/') {
                format!("http://{}{to}", self.host)
            } else {
                to
            };
            let done = http
                .put(format!("{to}&digest={}", Digest::of(blob)))
                .basic_auth(USER, Some(PASSWORD))
                .body(blob.clone())
                .send()
                .unwrap();
            assert_eq!(done.status(), 201);
        }
        let manifest = Digest::of(&example.manifest).to_string();
        for (name, kind, bytes) in [
            (manifest.as_str(), OCI_MANIFEST, &example.manifest),
            ("1", OCI_INDEX, &example.index),
        ] {
            let done = http
                .put(url(&format!("manifests/{name}")))
                .basic_auth(USER, Some(PASSWORD))
                .header("content-type", kind)
                .body(bytes.clone())
                .send()
                .unwrap();
            assert_eq!(done.status(), 201);
        }
    }

    /// The file of a blob in the storage of the registry.
    fn stored(&self, digest: Digest) -> PathBuf {
        let hex = digest.hex();
        let below = format!(
            "storage/docker/registry/v2/blobs/sha256/{}/{hex}/data",
            &hex[..2]
        );
        self.folder.path().join(below)
    }
}

fn check(host: &str, folder: &Path, with: &Registries, credential: Option<Credential>) {
    let example = Example::new();
    let image = pull_with(&format!("{host}/team/app:1"), with, credential, folder).unwrap();
    assert_eq!(image.digest, Digest::of(&example.manifest));
    for (layer, bytes) in image.layers.iter().zip(&example.layers) {
        assert_eq!(&layer.blob.read().unwrap(), bytes);
    }
}

fn password(word: &str) -> Option<Credential> {
    Some(Credential::Password {
        username: USER.into(),
        password: Secret::new(word.into()),
    })
}

#[test]
fn an_image_comes_out_as_it_went_in() {
    let registry = Registry::start("");
    registry.push(&Example::new());
    let at = tempfile::tempdir().unwrap();
    check(&registry.host, at.path(), &Registries::default(), None);
    let error = pull(&format!("{}/team/app:2", registry.host), at.path()).unwrap_err();
    assert!(matches!(error, RegistryError::NotFound { .. }), "{error}");
    // A fetch that broke off goes on where it was.
    let layer = &Example::new().layers[0];
    let hex = Digest::of(layer).hex();
    std::fs::remove_file(at.path().join(&hex)).unwrap();
    let mut part = std::fs::File::create(at.path().join(format!("{hex}.part"))).unwrap();
    part.write_all(&layer[..layer.len() - 10]).unwrap();
    check(&registry.host, at.path(), &Registries::default(), None);
}

#[test]
fn a_password_opens_what_is_closed() {
    let registry = Registry::with_password();
    registry.push(&Example::new());
    let name = format!("{}/team/app:1", registry.host);
    let at = tempfile::tempdir().unwrap();
    for (credential, sent) in [(None, false), (password("wrong"), true)] {
        let error = pull_with(&name, &Registries::default(), credential, at.path()).unwrap_err();
        assert!(
            matches!(error, RegistryError::Denied { credential, .. } if credential == sent),
            "{error}"
        );
    }
    check(
        &registry.host,
        at.path(),
        &Registries::default(),
        password(PASSWORD),
    );
}

#[test]
fn a_blob_that_was_changed_in_the_storage_is_refused() {
    let registry = Registry::start("");
    registry.push(&Example::new());
    let layer = &Example::new().layers[0];
    let path = registry.stored(Digest::of(layer));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let at = tempfile::tempdir().unwrap();
    let error = pull(&format!("{}/team/app:1", registry.host), at.path()).unwrap_err();
    assert!(
        matches!(error, RegistryError::Image(OciError::Digest { .. })),
        "{error}"
    );
}

#[test]
fn a_mirror_that_passes_on_serves_a_registry_that_cannot_be_reached() {
    let registry = Registry::start("");
    registry.push(&Example::new());
    let mirror = Registry::start(&format!(
        "proxy: {{remoteurl: 'http://{}'}}\n",
        registry.host
    ));
    let gone = "registry.invalid";
    let text = format!(
        "[[registry]]\nhost = \"{gone}\"\nmirrors = [\"http://{}\"]\n",
        mirror.host
    );
    let at = tempfile::tempdir().unwrap();
    check(gone, at.path(), &registries(&text), None);
}
