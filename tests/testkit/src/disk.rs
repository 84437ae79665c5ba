//! A guest's disk as files: a base that is never written and thin layers over it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use forkd_vmm_proto::{DiskSpec, EmptyLayer, RateLimit};

use crate::Fds;

/// One disk.
#[derive(Debug, Clone)]
pub struct Disk {
    /// The raw image.
    pub base: PathBuf,
    /// Layers, oldest first; the last is the one that is written.
    pub layers: Vec<PathBuf>,
    /// What the guest sees as the serial number.
    pub serial: String,
    /// Refuse writes.
    pub read_only: bool,
    /// Limits.
    pub rate: RateLimit,
}

impl Disk {
    /// A base with no layer yet.
    pub fn over(base: impl Into<PathBuf>, serial: &str) -> Self {
        Self {
            base: base.into(),
            layers: Vec::new(),
            serial: serial.to_owned(),
            read_only: false,
            rate: RateLimit::default(),
        }
    }

    /// The same stack with a new, empty layer in `folder` on top.
    pub fn with_new_layer(&self, folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join(format!("{}-{}.layer", self.serial, self.layers.len()));
        new_layer(&self.base, &path)?;
        let mut disk = self.clone();
        disk.layers.push(path);
        Ok(disk)
    }

    /// Opens the files and describes them.
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

/// Makes an empty layer as large as its base.
pub fn new_layer(base: &Path, path: &Path) -> anyhow::Result<File> {
    let size = std::fs::metadata(base)?.len();
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)?;
    let empty = EmptyLayer::new(size, 0);
    file.write_all_at(&empty.header, 0)
        .and_then(|()| file.set_len(empty.file_len))
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
