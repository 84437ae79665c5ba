//! The paths inside the data directory.

use std::path::{Path, PathBuf};

use forkd_types::{Digest, SandboxId, Tag};

/// The directories of a store.
#[derive(Debug, Clone)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    /// A store at this place.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The directory of everything.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The file that names the format.
    pub fn format_file(&self) -> PathBuf {
        self.root.join("store.json")
    }

    /// The file whose lock says that a daemon owns the store.
    pub fn lock_file(&self) -> PathBuf {
        self.root.join("store.lock")
    }

    /// Content by digest.
    pub fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    /// The file of a blob.
    pub fn blob(&self, digest: &Digest) -> PathBuf {
        self.blobs().join(digest.hex())
    }

    /// The directory of all tags.
    pub fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    /// The directory of a tag.
    pub fn snapshot(&self, tag: &Tag) -> PathBuf {
        self.snapshots().join(tag.as_str())
    }

    /// Files that are being written.
    pub fn staging(&self) -> PathBuf {
        self.root.join("staging")
    }

    /// The directory of live sandboxes.
    pub fn sandboxes(&self) -> PathBuf {
        self.root.join("sandboxes")
    }

    /// One live sandbox.
    pub fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.as_str())
    }

    /// The directory of images.
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// Images that are being fetched.
    pub fn fetching(&self) -> PathBuf {
        self.root.join("downloads/fetching")
    }

    /// Layers of container images, as they arrived.
    pub fn downloaded(&self) -> PathBuf {
        self.root.join("downloads/blobs")
    }

    /// The directory of kernels.
    pub fn kernels(&self) -> PathBuf {
        self.root.join("kernels")
    }

    /// Directories that [`crate::Store::open`] creates.
    pub(crate) fn directories(&self) -> [PathBuf; 6] {
        [
            self.blobs(),
            self.snapshots(),
            self.staging(),
            self.sandboxes(),
            self.images(),
            self.kernels(),
        ]
    }
}
