//! A container image in each form it may lie in becomes the same checked disk.

use std::fs;
use std::io::Write;
use std::path::Path;

use forkd_image::cache::Cache;
use forkd_image::image::{self, Image};
use forkd_image::progress::Progress;
use forkd_image::recipe::Recipe;
use forkd_image::root::ImageSource;
use forkd_image::root::oci::{OciRoot, OciRootError};
use forkd_oci::Means;
use forkd_oci::auth::Helpers;
use forkd_oci::digest::Digest;
use forkd_oci::manifest::Platform;
use forkd_oci::registries::Registries;
use forkd_oci::source::Source;
use forkd_types::MiB;
use serde_json::json;
use tar::{Builder, EntryType, Header};

fn layer(files: &[(&str, &str)]) -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    for (path, text) in files {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_size(text.len() as u64);
        header.set_mode(0o755);
        header.set_uid(1000);
        header.set_gid(1000);
        header.set_mtime(1_700_000_000);
        tar.append_data(&mut header, path, text.as_bytes()).unwrap();
    }
    tar.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Two layers, of which the upper hides a file, and their configuration.
struct Example {
    layers: Vec<Vec<u8>>,
    config: Vec<u8>,
}

impl Example {
    fn new() -> Self {
        let layers = vec![
            layer(&[("app/run", "one"), ("app/old", "gone")]),
            layer(&[("app/run", "two"), ("app/.wh.old", "")]),
        ];
        let diff_ids: Vec<_> = layers.iter().map(|layer| Digest::of(layer)).collect();
        let config = json!({
            "os": "linux", "architecture": "amd64",
            "config": {"Env": ["GREETING=hello"], "User": "1000", "WorkingDir": "/srv/work", "Cmd": ["/app/run"]},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        });
        Self {
            layers,
            config: config.to_string().into_bytes(),
        }
    }

    /// Writes a layout with an index that also has an image for another machine.
    fn layout(&self, folder: &Path) {
        let blobs = folder.join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        let put = |bytes: &[u8]| {
            let digest = Digest::of(bytes);
            fs::write(blobs.join(digest.hex()), bytes).unwrap();
            json!({"digest": digest, "size": bytes.len()})
        };
        let layers: Vec<_> = self.layers.iter().map(|layer| put(&gzip(layer))).collect();
        let manifest = json!({"schemaVersion": 2, "config": put(&self.config), "layers": layers});
        let mut ours = put(manifest.to_string().as_bytes());
        ours["platform"] = json!({"os": "linux", "architecture": "amd64"});
        let mut other = ours.clone();
        other["platform"]["architecture"] = json!("arm64");
        let index = json!({"schemaVersion": 2, "manifests": [other, ours]});
        fs::write(folder.join("index.json"), index.to_string()).unwrap();
        fs::write(
            folder.join("oci-layout"),
            r#"{"imageLayoutVersion":"1.0.0"}"#,
        )
        .unwrap();
    }

    /// Writes what `docker save` writes.
    fn docker_archive(&self, path: &Path) {
        let mut tar = Builder::new(fs::File::create(path).unwrap());
        let mut put = |name: &str, bytes: &[u8]| {
            let mut header = Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            tar.append_data(&mut header, name, bytes).unwrap();
        };
        put("config.json", &self.config);
        put("a/layer.tar", &self.layers[0]);
        put("b/layer.tar", &self.layers[1]);
        let manifest = json!([{
            "Config": "config.json", "RepoTags": ["example:1"], "Layers": ["a/layer.tar", "b/layer.tar"],
        }]);
        put("manifest.json", manifest.to_string().as_bytes());
        tar.finish().unwrap();
    }
}

/// Finds an image that is on this host.
fn open(source: &Source) -> Result<OciRoot, OciRootError> {
    let spool = tempfile::tempdir().unwrap();
    let means = Means {
        platform: &Platform::host(),
        registries: &Registries::default(),
        credential: None,
        auth_files: Vec::new(),
        helpers: Helpers::Ignore,
        blobs: spool.path().join("blobs"),
        spool: spool.path().join("spool"),
        told: &mut |_| {},
    };
    OciRoot::open(source, means)
}

fn build(cache: &Cache, source: &str) -> Image {
    let source: Source = source.parse().unwrap();
    let root = open(&source).unwrap();
    let name = source.short_name().parse().unwrap();
    let recipe = Recipe::of_image(name, &source.to_string(), MiB(64));
    image::build(cache, &recipe, &root, false, &Progress::silent()).unwrap()
}

#[test]
fn every_form_becomes_the_same_root() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let cache = Cache::at(at("cache"));
    let example = Example::new();
    example.layout(&at("layout"));
    example.docker_archive(&at("docker.tar"));
    let mut archive = Builder::new(fs::File::create(at("oci.tar")).unwrap());
    archive.append_dir_all(".", at("layout")).unwrap();
    archive.finish().unwrap();
    for source in [
        format!("oci:{}", at("layout").display()),
        format!("oci-archive:{}", at("oci.tar").display()),
        format!("docker-archive:{}:example:1", at("docker.tar").display()),
    ] {
        let image = build(&cache, &source);
        let record = &image.record;
        assert!(matches!(&record.source, ImageSource::Oci { image, .. } if *image == source));
        assert_eq!(record.env["GREETING"], "hello");
        assert_eq!(record.run.user.as_deref(), Some("1000"));
        assert_eq!(record.run.cmd, ["/app/run"]);
        let bytes = fs::read(image.disk()).unwrap();
        let disk = mkext4::reader::Fs::open(&bytes[..]).unwrap();
        let read = |path: &str| disk.read_file(disk.resolve(path).unwrap()).unwrap();
        assert_eq!(read("/app/run"), b"two", "{source}");
        assert!(disk.resolve("/app/old").is_err(), "{source}");
        assert!(disk.resolve("/srv/work").is_ok(), "{source}");
        let env = String::from_utf8(read("/etc/forkd/env")).unwrap();
        assert!(
            env.contains("GREETING=hello\n") && env.contains("PATH="),
            "{env}"
        );
    }
}

#[test]
fn a_blob_that_was_changed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let example = Example::new();
    example.layout(folder.path());
    let source: Source = format!("oci:{}", folder.path().display()).parse().unwrap();
    let config = Digest::of(&example.config).hex();
    let path = folder.path().join("blobs/sha256").join(config);
    let changed = String::from_utf8(example.config)
        .unwrap()
        .replace("1000", "0000");
    fs::write(path, changed).unwrap();
    let error = open(&source).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("should have the digest sha256:"), "{cause}");
}
