//! The disk of an image has the same entries as the folder that umoci unpacks from it: kind, mode, owner, size, time,
//! link targets, hard links and content.
//!
//! Runs as root only: umoci then gives files their owners and makes devices.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use forkd_image::image;
use forkd_image::progress::Progress;
use forkd_image::recipe::Recipe;
use forkd_image::root::oci::OciRoot;
use forkd_oci::Means;
use forkd_oci::auth::Helpers;
use forkd_oci::digest::Digest;
use forkd_oci::manifest::Platform;
use forkd_oci::registries::Registries;
use forkd_oci::source::Source;
use forkd_types::MiB;
use serde_json::json;
use tar::{Builder, EntryType, Header};

/// Paths that forkd adds to an image, or empties, so that it can be a guest.
const OURS: [&str; 11] = [
    "dev",
    "etc/environment",
    "etc/forkd",
    "etc/hostname",
    "etc/hosts",
    "etc/machine-id",
    "etc/resolv.conf",
    "lost+found",
    "proc",
    "run",
    "sys",
];

/// An entry of a tree, as both sides describe it. Entries with the same first name are one file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    mode: u32,
    owner: (u32, u32),
    mtime: i64,
    /// Content, or the target of a symbolic link.
    content: Vec<u8>,
    first_name: String,
}

struct Layer(Builder<Vec<u8>>);

impl Layer {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    fn header(kind: EntryType, mode: u32, size: usize) -> Header {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(size as u64);
        header.set_mode(mode);
        header.set_uid(1000);
        header.set_gid(70_000);
        header.set_mtime(1_600_000_000);
        header
    }

    fn folder(mut self, path: &str, mode: u32) -> Self {
        let mut header = Self::header(EntryType::Directory, mode, 0);
        self.0.append_data(&mut header, path, &b""[..]).unwrap();
        self
    }

    fn file(mut self, path: &str, mode: u32, content: &[u8]) -> Self {
        let mut header = Self::header(EntryType::Regular, mode, content.len());
        self.0.append_data(&mut header, path, content).unwrap();
        self
    }

    fn link(mut self, kind: EntryType, path: &str, to: &str) -> Self {
        let mut header = Self::header(kind, 0o777, 0);
        self.0.append_link(&mut header, path, to).unwrap();
        self
    }

    fn device(mut self, kind: EntryType, path: &str) -> Self {
        let mut header = Self::header(kind, 0o600, 0);
        header.set_device_major(1).unwrap();
        header.set_device_minor(3).unwrap();
        self.0.append_data(&mut header, path, &b""[..]).unwrap();
        self
    }

    fn end(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

/// Three layers with everything that a layer may do to those below.
fn layers() -> Vec<Vec<u8>> {
    let (soft, hard) = (EntryType::Symlink, EntryType::Link);
    let mut lower = Layer::new()
        .folder("etc", 0o755)
        .folder("usr", 0o755)
        .folder("usr/lib", 0o755)
        .link(soft, "lib", "usr/lib")
        .file("usr/lib/one", 0o644, b"one")
        .file("usr/lib/setuid", 0o4755, b"program")
        .folder("data", 0o1777)
        .folder("data/deep", 0o700)
        .file("data/deep/gone", 0o600, b"gone")
        .file("data/gone", 0o600, b"gone")
        .file("data/replaced", 0o600, b"a file")
        .folder("data/emptied", 0o750)
        .file("data/emptied/old", 0o600, b"old")
        .file("data/linked", 0o640, b"linked")
        .link(hard, "data/other-name", "data/linked")
        .link(soft, "data/dangling", "/no/where")
        .device(EntryType::Char, "data/null")
        .device(EntryType::Fifo, "data/pipe");
    for number in 0..200 {
        lower = lower.file(
            &format!("data/many-{number}"),
            0o644,
            &vec![b'x'; number * 37],
        );
    }
    let middle = Layer::new()
        .file("data/.wh.gone", 0o600, b"")
        .file("data/deep/.wh.gone", 0o600, b"")
        .file("data/emptied/new", 0o600, b"new")
        .file("data/emptied/.wh..wh..opq", 0o600, b"")
        .folder("data/replaced", 0o755)
        .file("data/replaced/inside", 0o644, b"inside")
        .file("data/many-7", 0o600, b"changed");
    let upper = Layer::new()
        .file("data/linked", 0o644, b"a file of its own now")
        .link(hard, "data/third-name", "data/other-name")
        .file("data/gone", 0o644, b"back")
        .folder("usr/lib", 0o711);
    vec![lower.end(), middle.end(), upper.end()]
}

fn layout(folder: &Path, layers: &[Vec<u8>]) {
    let blobs = folder.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |kind: &str, bytes: &[u8]| {
        let digest = Digest::of(bytes);
        fs::write(blobs.join(digest.hex()), bytes).unwrap();
        json!({"mediaType": kind, "digest": digest, "size": bytes.len()})
    };
    let diff_ids: Vec<_> = layers.iter().map(|layer| Digest::of(layer)).collect();
    let config = json!({
        "os": "linux", "architecture": "amd64", "config": {},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        "history": vec![json!({"created_by": "test"}); layers.len()],
    });
    let config = put(
        "application/vnd.oci.image.config.v1+json",
        config.to_string().as_bytes(),
    );
    let layers: Vec<_> = layers
        .iter()
        .map(|layer| put("application/vnd.oci.image.layer.v1.tar", layer))
        .collect();
    let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
    let kind = "application/vnd.oci.image.manifest.v1+json";
    let mut entry = put(kind, manifest.to_string().as_bytes());
    entry["annotations"] = json!({"org.opencontainers.image.ref.name": "test"});
    let index = json!({"schemaVersion": 2, "manifests": [entry]});
    fs::write(folder.join("index.json"), index.to_string()).unwrap();
    fs::write(
        folder.join("oci-layout"),
        r#"{"imageLayoutVersion":"1.0.0"}"#,
    )
    .unwrap();
}

fn umoci() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let cache =
        std::env::var_os("XDG_CACHE_HOME").map_or_else(|| home().join(".cache"), PathBuf::from);
    let unpacked = cache.join("forkd/tools/usr/bin/umoci");
    if unpacked.exists() {
        unpacked
    } else {
        "umoci".into()
    }
}

fn is_ours(path: &str) -> bool {
    OURS.iter()
        .any(|ours| path == *ours || path.starts_with(&format!("{ours}/")))
        || path.starts_with("tmp")
}

fn of_folder(root: &Path) -> BTreeMap<String, Entry> {
    let mut all = BTreeMap::new();
    let mut todo = vec![String::new()];
    while let Some(folder) = todo.pop() {
        let mut inside: Vec<_> = fs::read_dir(root.join(&folder))
            .unwrap()
            .map(|entry| entry.unwrap())
            .collect();
        inside.sort_by_key(fs::DirEntry::file_name);
        for entry in inside {
            let name = entry.file_name().into_string().unwrap();
            let path = if folder.is_empty() {
                name
            } else {
                format!("{folder}/{name}")
            };
            if is_ours(&path) {
                continue;
            }
            let meta = fs::symlink_metadata(entry.path()).unwrap();
            let content = if meta.is_symlink() {
                fs::read_link(entry.path())
                    .unwrap()
                    .into_os_string()
                    .into_vec()
            } else if meta.is_file() {
                fs::read(entry.path()).unwrap()
            } else {
                Vec::new()
            };
            if meta.is_dir() {
                todo.push(path.clone());
            }
            let entry = Entry {
                mode: meta.mode(),
                owner: (meta.uid(), meta.gid()),
                mtime: meta.mtime(),
                content,
                first_name: meta.ino().to_string(),
            };
            all.insert(path, entry);
        }
    }
    named_by_first(all)
}

/// Inode numbers differ between the two sides; the first name of a file does not.
fn named_by_first(mut all: BTreeMap<String, Entry>) -> BTreeMap<String, Entry> {
    let mut first: BTreeMap<String, String> = BTreeMap::new();
    for (path, entry) in &all {
        first
            .entry(entry.first_name.clone())
            .or_insert_with(|| path.clone());
    }
    for entry in all.values_mut() {
        entry.first_name = first[&entry.first_name].clone();
    }
    all
}

fn of_disk(disk: &Path) -> BTreeMap<String, Entry> {
    let bytes = fs::read(disk).unwrap();
    let fs = mkext4::reader::Fs::open(&bytes[..]).unwrap();
    let mut all = BTreeMap::new();
    let mut todo = vec![(String::new(), fs.resolve("/").unwrap())];
    while let Some((folder, number)) = todo.pop() {
        for entry in fs.read_dir(number).unwrap() {
            let name = String::from_utf8(entry.name).unwrap();
            let path = if folder.is_empty() {
                name.clone()
            } else {
                format!("{folder}/{name}")
            };
            if name == "." || name == ".." || is_ours(&path) {
                continue;
            }
            let inode = fs.inode(entry.inode).unwrap();
            let content = match inode.mode & 0o170_000 {
                0o100_000 => fs.read_file(entry.inode).unwrap(),
                0o120_000 => fs.symlink_target(entry.inode).unwrap(),
                0o040_000 => {
                    todo.push((path.clone(), entry.inode));
                    Vec::new()
                }
                _ => Vec::new(),
            };
            let entry = Entry {
                mode: inode.mode.into(),
                owner: (inode.uid, inode.gid),
                mtime: inode.mtime.into(),
                content,
                first_name: entry.inode.to_string(),
            };
            all.insert(path, entry);
        }
    }
    named_by_first(all)
}

#[test]
fn the_disk_has_the_entries_that_umoci_unpacks() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: umoci gives files their owners as root only");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (at, bundle) = (folder.path().join("layout"), folder.path().join("bundle"));
    layout(&at, &layers());
    let done = Command::new(umoci())
        .args(["unpack", "--image"])
        .arg(format!("{}:test", at.display()))
        .arg(&bundle)
        .output()
        .expect("umoci is missing: run scripts/unpack-tools.sh");
    assert!(
        done.status.success(),
        "{}",
        String::from_utf8_lossy(&done.stderr)
    );
    let source: Source = format!("oci:{}", at.display()).parse().unwrap();
    let root = OciRoot::open(
        &source,
        Means {
            platform: &Platform::host(),
            registries: &Registries::default(),
            credential: None,
            auth_files: Vec::new(),
            helpers: Helpers::Ignore,
            blobs: folder.path().join("blobs"),
            spool: folder.path().join("spool"),
            told: &mut |_| {},
        },
    )
    .unwrap();
    let recipe = Recipe::of_image("test".parse().unwrap(), "oci:test", MiB(64));
    let made = folder.path().join("image");
    fs::create_dir(&made).unwrap();
    let image = image::build_in(&made, &recipe, &root, &Progress::silent()).unwrap();
    let (theirs, ours) = (of_folder(&bundle.join("rootfs")), of_disk(&image.disk()));
    assert!(theirs.len() > 200, "{}", theirs.len());
    for (path, entry) in &theirs {
        assert_eq!(ours.get(path), Some(entry), "{path}");
    }
    let extra: Vec<_> = ours
        .keys()
        .filter(|path| !theirs.contains_key(*path))
        .collect();
    assert!(extra.is_empty(), "{extra:?}");
}
