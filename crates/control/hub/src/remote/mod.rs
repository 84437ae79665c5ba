//! Artifacts on other hosts: registries, web servers, object stores.
//!
//! ```text
//!   oci://HOST/REPOSITORY[:TAG]   a registry           read and written
//!   s3://BUCKET/PREFIX:NAME       an object store      read and written
//!   https://HOST/FOLDER/:NAME     a web server         read
//!   https://HOST/FILE.forkd       one file             read and written
//! ```
//!
//! The command line uses this module; the daemon makes no request for a client. Every pack is compared with its digest
//! before another program sees it. An interrupted transfer goes on where it ended: packs on their way and the addresses
//! of unfinished uploads lie in a [`Cache`].

mod bucket;
pub mod file;
mod registry;
mod sigv4;
mod web;

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forkd_oci::registry::{BlobSource, Blobs, RegistryError, Wanted, Watch};

use crate::error::HubError;
use crate::layout::Content;
use crate::manifest::Descriptor;

pub use bucket::{Bucket, Keys};
pub use registry::Registry;
pub use web::WebFolder;

/// Bytes of packs that stay on this host after transfers that did not end.
const KEPT: u64 = 4 << 30;

/// Where transfers go on: packs that are on their way, and notes on uploads. Versioned by the name of its folder.
#[derive(Debug, Clone)]
pub struct Cache {
    blobs: Blobs,
    notes: PathBuf,
    /// Set to end transfers soon.
    stop: Arc<AtomicBool>,
}

impl Cache {
    /// Uses a folder, which is made if it is missing.
    pub fn at(folder: &Path, stop: Arc<AtomicBool>) -> Result<Self, HubError> {
        let folder = folder.join("v1");
        let blobs = Blobs::at(folder.join("packs")).map_err(RegistryError::from)?;
        blobs.trim(KEPT).map_err(RegistryError::from)?;
        Ok(Self {
            blobs,
            notes: folder.join("uploads"),
            stop,
        })
    }

    fn fetch(
        &self,
        pack: &Descriptor,
        get: impl FnOnce(&Wanted, &Blobs, &Watch<'_>) -> Result<forkd_oci::part::Part, RegistryError>,
    ) -> Result<Box<dyn Read + Send>, HubError> {
        let watch = Watch {
            arrived: &|_| {},
            stop: &self.stop,
        };
        Ok(Box::new(get(&wanted(pack), &self.blobs, &watch)?.reader()))
    }

    /// A pack from one place.
    fn fetch_from(
        &self,
        place: &impl BlobSource,
        pack: &Descriptor,
    ) -> Result<Box<dyn Read + Send>, HubError> {
        self.fetch(pack, |wanted, blobs, watch| {
            blobs.get(std::slice::from_ref(place), wanted, watch)
        })
    }

    /// Removes packs that have arrived where they belong.
    fn forget(&self, packs: &[Descriptor]) {
        for pack in packs {
            self.blobs.remove(pack.digest);
        }
    }

    /// The content of an upload, which ends with an error once the transfer is to stop.
    fn stoppable(&self, content: Content<'_>) -> io::Result<Box<dyn Read + Send>> {
        Ok(Box::new(Stoppable {
            content: content()?,
            stop: Arc::clone(&self.stop),
        }))
    }
}

struct Stoppable {
    content: Box<dyn Read + Send>,
    stop: Arc<AtomicBool>,
}

impl Read for Stoppable {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("the transfer was stopped"));
        }
        self.content.read(buffer)
    }
}

fn wanted(blob: &Descriptor) -> Wanted {
    Wanted {
        digest: blob.digest,
        size: blob.size,
        what: format!("the pack {}", blob.digest),
    }
}

/// Whether a name can be a part of a path or URL as it is.
fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 128
        && !name.starts_with('.')
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

/// The path of the list of one name, below the folder or prefix of a layout.
fn name_path(name: &str) -> String {
    format!("refs/{name}.json")
}

/// Host and port of a URL.
fn host_of(url: &reqwest::Url) -> Option<String> {
    let host = url.host_str()?;
    Some(match url.port() {
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    })
}
