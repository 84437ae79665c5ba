//! Packs of forkd 0.5: a tar archive in zstd, with `manifest.toml` first.
//!
//! They hold memory and state of Firecracker, which no engine of this version runs. They are described, and every file
//! is compared with its digest, so that a user learns what to do with them. `target_path`, which made the old program
//! write to any path, is ignored.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use forkd_oci::digest::{Digest, Hasher};
use forkd_types::path_error;
use serde::Deserialize;

use crate::error::HubError;

const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const MANIFEST: &str = "manifest.toml";
const MAX_MANIFEST: u64 = 1 << 20;
const NEWEST: u32 = 2;
/// Bytes of all files together.
const MAX_UNPACKED: u64 = 256 << 30;

/// The manifest of a pack, as far as it is of use.
#[derive(Debug, Clone, Deserialize)]
pub struct Published {
    pub forkd_pack_version: u32,
    pub tag: String,
    #[serde(default)]
    pub description: Option<String>,
    #[serde(default)]
    pub base_image: Option<String>,
    #[serde(default)]
    pub forkd_version: String,
    #[serde(default)]
    pub files: Vec<PublishedFile>,
    #[serde(default)]
    pub chain: Vec<Link>,
    #[serde(default)]
    pub rootfs: Option<Rootfs>,
}

/// One file of a pack.
#[derive(Debug, Clone, Deserialize)]
pub struct PublishedFile {
    pub path: String,
    pub size: u64,
    pub sha256: String,
}

/// One snapshot of a chain.
#[derive(Debug, Clone, Deserialize)]
pub struct Link {
    pub tag: String,
    #[serde(default)]
    pub files: Vec<PublishedFile>,
}

/// The disk, which lies beside the pack.
#[derive(Debug, Clone, Deserialize)]
pub struct Rootfs {
    pub sha256: String,
    pub size: u64,
}

/// Whether a file begins like a pack of forkd 0.5.
pub fn looks_published(path: &Path) -> bool {
    let mut start = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    read.is_ok() && start == ZSTD
}

/// Reads a pack to its end and compares every file that its manifest names.
pub fn inspect(path: &Path) -> Result<Published, HubError> {
    let file = File::open(path).map_err(path_error("open", path))?;
    let read = path_error("read", path);
    let decoder = zstd::stream::read::Decoder::new(file).map_err(read)?;
    inspect_tar(decoder)
}

fn inspect_tar(input: impl Read) -> Result<Published, HubError> {
    let damaged = |_| HubError::invalid("the pack of forkd 0.5 is damaged");
    let mut archive = tar::Archive::new(input.take(MAX_UNPACKED));
    let mut entries = archive.entries().map_err(damaged)?;
    let first = entries.next().transpose().map_err(damaged)?;
    let first = first.filter(|entry| *entry.path_bytes() == *MANIFEST.as_bytes());
    let first =
        first.ok_or_else(|| HubError::invalid("the file does not begin with manifest.toml"))?;
    let mut text = String::new();
    let limited = first.take(MAX_MANIFEST).read_to_string(&mut text);
    limited.map_err(damaged)?;
    let published: Published = toml::from_str(&text).map_err(|error| {
        HubError::invalid(format!(
            "its manifest.toml does not parse: {}",
            error.message()
        ))
    })?;
    if !(1..=NEWEST).contains(&published.forkd_pack_version) {
        return Err(HubError::Version {
            what: "a pack of version",
            found: published.forkd_pack_version.to_string(),
            known: format!("1 to {NEWEST}"),
        });
    }
    for entry in entries {
        let mut entry = entry.map_err(damaged)?;
        let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        let Some(expected) = published.file(&name) else {
            continue;
        };
        let mut hasher = Hasher::default();
        std::io::copy(&mut entry, &mut hasher).map_err(damaged)?;
        let found: Digest = hasher.finish();
        if found.hex() != expected.sha256 {
            return Err(HubError::Digest {
                what: name.chars().take(100).collect(),
                expected: format!("sha256:{}", expected.sha256),
                found: found.to_string(),
            });
        }
    }
    Ok(published)
}

impl Published {
    fn file(&self, name: &str) -> Option<&PublishedFile> {
        let own = self.files.iter().find(|file| file.path == name);
        own.or_else(|| {
            let (tag, path) = name.split_once('/')?;
            let link = self.chain.iter().find(|link| link.tag == tag)?;
            link.files
                .iter()
                .find(|file| file.path == path || file.path == name)
        })
    }

    /// One line about the pack.
    pub fn summary(&self) -> String {
        let links = self.chain.len().max(1);
        let mut text = format!(
            "snapshot {} of {links} link(s), version {}",
            self.tag, self.forkd_pack_version
        );
        if let Some(image) = &self.base_image {
            text.push_str(&format!(", from {image}"));
        }
        if let Some(rootfs) = &self.rootfs {
            let id: String = rootfs.sha256.chars().take(16).collect();
            text.push_str(&format!(", its disk is {id}.rootfs.zst beside it"));
        }
        text.chars().filter(|c| !c.is_control()).take(400).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(manifest: &str, files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        let all = std::iter::once((MANIFEST, manifest.as_bytes())).chain(files.iter().copied());
        for (name, content) in all {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            builder.append_data(&mut header, name, content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn manifest(version: u32, memory: &[u8]) -> String {
        let sum = Digest::of(memory).hex();
        format!(
            "forkd_pack_version = {version}\ntag = \"py\"\nbase_image = \"python:3.12\"\nforkd_version = \"0.5.3\"\n\
             [[files]]\npath = \"memory.bin\"\nsize = {}\nsha256 = \"{sum}\"\n\
             [rootfs]\ntarget_path = \"/etc/cron.d/x\"\nsha256 = \"{sum}\"\nsize = 3\n",
            memory.len()
        )
    }

    #[test]
    fn a_pack_is_described_and_its_files_are_compared() {
        let bytes = archive(
            &manifest(1, b"abc"),
            &[("memory.bin", b"abc"), ("more", b"x")],
        );
        let published = inspect_tar(bytes.as_slice()).unwrap();
        let summary = published.summary();
        assert!(
            summary.contains("py") && summary.contains(".rootfs.zst"),
            "{summary}"
        );
        assert!(!summary.contains("cron"), "{summary}");
        let bytes = archive(&manifest(1, b"abc"), &[("memory.bin", b"abd")]);
        let error = inspect_tar(bytes.as_slice()).unwrap_err();
        assert_eq!(error.kind(), crate::Kind::Digest);
    }

    #[test]
    fn chains_are_read_and_newer_packs_refused() {
        let sum = Digest::of(b"abc").hex();
        let chain = format!(
            "forkd_pack_version = 2\ntag = \"b\"\n[[chain]]\ntag = \"a\"\n[[chain.files]]\npath = \"memory.bin\"\n\
             size = 3\nsha256 = \"{sum}\"\n"
        );
        let good = archive(&chain, &[("a/memory.bin", b"abc")]);
        assert_eq!(inspect_tar(good.as_slice()).unwrap().chain.len(), 1);
        let bad = archive(&chain, &[("a/memory.bin", b"abd")]);
        assert!(inspect_tar(bad.as_slice()).is_err());
        let newer = archive(&manifest(3, b""), &[]);
        let error = inspect_tar(newer.as_slice()).unwrap_err();
        assert_eq!(error.kind(), crate::Kind::Incompatible);
        assert!(inspect_tar(&b"garbage"[..]).is_err());
    }
}
