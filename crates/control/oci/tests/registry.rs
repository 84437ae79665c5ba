//! Debian's registry, on loopback: images go in over its own protocol and come out the same.

mod debian_registry;
mod support;

use std::io::Write;
use std::path::Path;

use debian_registry::Server;
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

/// A registry that images are pushed to.
struct Registry {
    server: Server,
}

impl Registry {
    /// `more` is appended to the configuration.
    fn start(more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self {
            server: Server::start(folder, more),
        }
    }

    fn host(&self) -> &str {
        &self.server.host
    }

    fn with_password() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("htpasswd");
        std::fs::write(&path, format!("{USER}:{HASH}\n")).unwrap();
        let path = path.display();
        let more = format!("auth: {{htpasswd: {{realm: test, path: {path}}}}}\n");
        Self {
            server: Server::start(folder, &more),
        }
    }

    /// Puts an image in, as `docker push` does.
    fn push(&self, example: &Example) {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let http = Client::builder()
            .no_proxy()
            .tls_certs_only([])
            .build()
            .unwrap();
        let url = |path: &str| format!("http://{}/v2/team/app/{path}", self.host());
        for blob in example.layers.iter().chain([&example.config]) {
            let begun = http
                .post(url("blobs/uploads/"))
                .basic_auth(USER, Some(PASSWORD))
                .send()
                .unwrap();
            let to = begun.headers()["location"].to_str().unwrap().to_owned();
            let to = if to.starts_with('/') {
                format!("http://{}{to}", self.host())
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
    check(registry.host(), at.path(), &Registries::default(), None);
    let error = pull(&format!("{}/team/app:2", registry.host()), at.path()).unwrap_err();
    assert!(matches!(error, RegistryError::NotFound { .. }), "{error}");
    // A fetch that broke off goes on where it was.
    let layer = &Example::new().layers[0];
    let hex = Digest::of(layer).hex();
    std::fs::remove_file(at.path().join(&hex)).unwrap();
    let mut part = std::fs::File::create(at.path().join(format!("{hex}.part"))).unwrap();
    part.write_all(&layer[..layer.len() - 10]).unwrap();
    check(registry.host(), at.path(), &Registries::default(), None);
}

#[test]
fn a_password_opens_what_is_closed() {
    let registry = Registry::with_password();
    registry.push(&Example::new());
    let name = format!("{}/team/app:1", registry.host());
    let at = tempfile::tempdir().unwrap();
    for (credential, sent) in [(None, false), (password("wrong"), true)] {
        let error = pull_with(&name, &Registries::default(), credential, at.path()).unwrap_err();
        assert!(
            matches!(error, RegistryError::Denied { credential, .. } if credential == sent),
            "{error}"
        );
    }
    check(
        registry.host(),
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
    let path = registry.server.blob(&Digest::of(layer).hex());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let at = tempfile::tempdir().unwrap();
    let error = pull(&format!("{}/team/app:1", registry.host()), at.path()).unwrap_err();
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
        registry.host()
    ));
    let gone = "registry.invalid";
    let text = format!(
        "[[registry]]\nhost = \"{gone}\"\nmirrors = [\"http://{}\"]\n",
        mirror.host()
    );
    let at = tempfile::tempdir().unwrap();
    check(gone, at.path(), &registries(&text), None);
}
