//! The root of a guest as the one layer of an OCI image.
//!
//! The layer is written to a file first: an archive has the digest and the size of a blob in front of its bytes.

use std::path::PathBuf;
use std::sync::Arc;

use forkd_api::ErrorCode;
use forkd_guest_proto::{PackItem, PackRequest};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_types::Tag;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::config::Config;
use crate::machine::Machine;
use crate::mounts::WORK;
use crate::upload::Folder;

/// The largest layer.
const MAX_BYTES: u64 = 64 << 30;
const PIECE: usize = 256 << 10;
/// Folders that belong to forkd and not to the image.
const OURS: [&str; 2] = ["/etc/forkd", WORK];
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// The root of a guest in a file.
#[derive(Debug)]
pub struct Layer {
    folder: Folder,
    size: u64,
    digest: String,
}

impl Layer {
    /// Packs the root of a guest.
    pub async fn pack(app: &Arc<App>, machine: &Machine) -> Result<Self, Error> {
        let folder = Folder::make(app).await?;
        let path = folder.path.join("layer.tar");
        let failed = || Error::io("write", path.clone());
        let mut file = tokio::fs::File::create_new(&path).await.map_err(failed())?;
        let lost = || Error::agent("the files of the guest could not be packed");
        let request = PackRequest {
            items: vec![PackItem {
                from: "/".to_owned(),
                to: String::new(),
            }],
            one_file_system: true,
            exclude: OURS.iter().map(ToString::to_string).collect(),
        };
        let mut packing = machine.calls().await?.pack(request).map_err(lost())?;
        let mut hasher = Sha256::new();
        let mut size = 0;
        while let Some(piece) = packing.next().await.map_err(lost())? {
            size += piece.len() as u64;
            if size > MAX_BYTES {
                return Err(Error::refused(
                    ErrorCode::TooLarge,
                    format!("the image is larger than {} GiB", MAX_BYTES >> 30),
                ));
            }
            hasher.update(&piece);
            file.write_all(&piece).await.map_err(failed())?;
        }
        file.flush().await.map_err(failed())?;
        Ok(Self {
            folder,
            size,
            digest: hex::encode(hasher.finalize()),
        })
    }

    /// Sends the image as an OCI archive.
    pub async fn send(
        &self,
        config: &Config,
        name: &Tag,
        to: &mpsc::Sender<Vec<u8>>,
    ) -> Result<(), Error> {
        let path: PathBuf = self.folder.path.join("layer.tar");
        let failed = || Error::io("read", path.clone());
        let gone = |_| Error::refused(ErrorCode::WrongState, "the receiver of the image is gone");
        let (front, back) = around(&self.digest, self.size, config, name)?;
        to.send(front).await.map_err(gone)?;
        let mut file = tokio::fs::File::open(&path).await.map_err(failed())?;
        loop {
            let mut piece = vec![0; PIECE];
            let count = file.read(&mut piece).await.map_err(failed())?;
            if count == 0 {
                break;
            }
            piece.truncate(count);
            to.send(piece).await.map_err(gone)?;
        }
        to.send(back).await.map_err(gone)
    }

    /// The digest of the layer, in hexadecimal digits.
    pub fn digest(&self) -> &str {
        &self.digest
    }
}

/// A whole OCI archive with a small layer.
pub fn oci_archive(layer: &[u8], config: &Config, name: &Tag) -> Result<Vec<u8>, Error> {
    let digest = hex::encode(Sha256::digest(layer));
    let (mut bytes, back) = around(&digest, layer.len() as u64, config, name)?;
    bytes.extend_from_slice(layer);
    bytes.extend(back);
    Ok(bytes)
}

/// The bytes in front of the layer, and those behind it.
fn around(
    layer: &str,
    size: u64,
    config: &Config,
    name: &Tag,
) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let config = config.to_oci(&format!("sha256:{layer}")).to_string();
    let blob = |bytes: &str| hex::encode(Sha256::digest(bytes));
    let descriptor = |kind: &str, digest: &str, size: u64| -> Value {
        json!({ "mediaType": kind, "digest": format!("sha256:{digest}"), "size": size })
    };
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": descriptor("application/vnd.oci.image.config.v1+json", &blob(&config), config.len() as u64),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", layer, size)],
    })
    .to_string();
    let mut entry = descriptor(MANIFEST, &blob(&manifest), manifest.len() as u64);
    if let Some(entry) = entry.as_object_mut() {
        let names = json!({ "org.opencontainers.image.ref.name": name.as_str() });
        entry.insert("annotations".into(), names);
        let platform = json!({ "architecture": "amd64", "os": "linux" });
        entry.insert("platform".into(), platform);
    }
    let index = json!({ "schemaVersion": 2, "manifests": [entry] }).to_string();
    let failed = |_| Error::Task;
    let mut front = tar::Builder::new(Vec::new());
    let layout = r#"{"imageLayoutVersion":"1.0.0"}"#;
    for (path, text) in [
        ("oci-layout".to_owned(), layout),
        ("index.json".to_owned(), &index),
        (format!("blobs/sha256/{}", blob(&manifest)), &manifest),
        (format!("blobs/sha256/{}", blob(&config)), &config),
    ] {
        let mut header = header(text.len() as u64);
        front
            .append_data(&mut header, path, text.as_bytes())
            .map_err(failed)?;
    }
    let mut header = header(size);
    header
        .set_path(format!("blobs/sha256/{layer}"))
        .map_err(failed)?;
    header.set_cksum();
    // Not finished: the layer and the end of the archive follow.
    let mut bytes = std::mem::take(front.get_mut());
    bytes.extend_from_slice(header.as_bytes());
    let padding = (512 - size % 512) % 512;
    let back = vec![0; usize::try_from(padding + 1024).unwrap_or(1024)];
    Ok((bytes, back))
}

fn header(size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_size(size);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn every_blob_of_the_archive_has_the_digest_of_its_name() {
        let name: Tag = "x".parse().unwrap();
        let layer = vec![7; 700];
        let bytes = oci_archive(&layer, &Config::default(), &name).unwrap();
        assert_eq!(bytes.len() % 512, 0);
        let mut archive = tar::Archive::new(bytes.as_slice());
        let mut names = Vec::new();
        for entry in archive.entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            if let Some(digest) = path.strip_prefix("blobs/sha256/") {
                assert_eq!(digest, hex::encode(Sha256::digest(&content)));
            }
            names.push(path);
        }
        assert_eq!(names.len(), 5, "{names:?}");
    }
}
