//! A guest's disk as files: a read-only base, and thin layers over it.
//!
//! Only the last layer is written. [`Disk::spec`] opens the files for a VMM.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use forkd_formats::layer::LayerHeader;
use forkd_vmm_proto::{DiskSpec, RateLimit};

use crate::Fds;

#[derive(Debug, Clone)]
pub struct Disk {
    /// The raw image.
    pub base: PathBuf,
    /// Layers, oldest first; the last is the one that is written.
    pub layers: Vec<PathBuf>,
    /// The serial number that the guest sees.
    pub serial: String,
    pub read_only: bool,
    /// Limits on bytes and operations per second.
    pub rate: RateLimit,
    /// Upper bound on the bytes of each new layer; 0 for no limit.
    pub limit: u64,
}

impl Disk {
    /// A base without a layer.
    pub fn over(base: impl Into<PathBuf>, serial: &str) -> Self {
        Self {
            base: base.into(),
            layers: Vec::new(),
            serial: serial.to_owned(),
            read_only: false,
            rate: RateLimit::default(),
            limit: 0,
        }
    }

    /// A base of zeroes in `folder` with one layer.
    pub fn empty(folder: &Path, serial: &str, bytes: u64) -> anyhow::Result<Self> {
        let base = folder.join(format!("{serial}.img"));
        File::create_new(&base)?.set_len(bytes)?;
        Self::over(base, serial).with_new_layer(folder)
    }

    /// The same stack with a new, empty layer in `folder`.
    pub fn with_new_layer(&self, folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join(format!("{}-{}.layer", self.serial, self.layers.len()));
        new_layer(&self.base, &path, self.limit)?;
        let mut disk = self.clone();
        disk.layers.push(path);
        Ok(disk)
    }

    /// Bytes that the top layer uses on the host.
    pub fn allocated(&self) -> anyhow::Result<u64> {
        let top = self.layers.last().unwrap_or(&self.base);
        Ok(std::fs::metadata(top)?.blocks() * 512)
    }

    /// Opens the files and describes them for the VMM.
    pub fn spec(&self, fds: &mut Fds) -> anyhow::Result<DiskSpec> {
        let writable_base = self.layers.is_empty() && !self.read_only;
        let base = fds.add(open(&self.base, writable_base)?);
        let mut layers = Vec::new();
        for (at, layer) in self.layers.iter().enumerate() {
            let top = at + 1 == self.layers.len() && !self.read_only;
            layers.push(fds.add(open(layer, top)?));
        }
        Ok(DiskSpec {
            base,
            layers,
            read_only: self.read_only,
            serial: self.serial.clone(),
            rate: self.rate,
        })
    }
}

/// Creates an empty layer of the size of its base.
pub fn new_layer(base: &Path, path: &Path, limit: u64) -> anyhow::Result<File> {
    let size = std::fs::metadata(base)?.len();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    let empty = LayerHeader::new(size, limit)?;
    file.write_all_at(&empty.encode(), 0)
        .and_then(|()| file.set_len(empty.file_len()))
        .with_context(|| format!("cannot make the layer {}", path.display()))?;
    Ok(file)
}

fn open(path: &Path, writable: bool) -> anyhow::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(writable)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}
