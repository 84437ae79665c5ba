//! Turning files into content.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use forkd_types::{Digest, path_error};

use crate::error::StoreError;
use crate::lease::Lease;
use crate::manifest::BlobRef;
use crate::store::Store;
use crate::{blobs, sparse};

/// A file that is now content.
#[derive(Debug)]
pub struct Ingested {
    /// Its digest and length.
    pub blob: BlobRef,
    /// Keeps it until a manifest names it.
    pub lease: Lease,
}

impl Store {
    /// Hashes a file that will not change any more and gives it its name as content. The file keeps its
    /// own name too; the caller removes that when nothing refers to it. It need not be synced: that comes with the first
    /// tag that names it.
    pub fn ingest(&self, path: &Path) -> Result<Ingested, StoreError> {
        let blob = self.hash(path)?;
        self.step()?;
        let _commit = self.commit();
        let lease = self.leases.hold([blob.digest]);
        let was_durable = self.durable.lock().contains(&blob.digest);
        blobs::link(&self.layout, path, &blob, was_durable)?;
        self.step()?;
        Ok(Ingested { blob, lease })
    }

    /// As [`Store::ingest`] for a file that others may change or that lies elsewhere: it is copied first,
    /// by sharing blocks where the file system can.
    pub fn ingest_copy(&self, path: &Path) -> Result<Ingested, StoreError> {
        let staging = self.stage()?;
        let copy = staging.file("copy");
        let from = File::open(path).map_err(path_error("open", path))?;
        let to = File::create(&copy).map_err(path_error("create", &copy))?;
        sparse::copy(&from, &to).map_err(path_error("copy", path))?;
        self.ingest(&copy)
    }

    fn hash(&self, path: &Path) -> Result<BlobRef, StoreError> {
        let meta = std::fs::metadata(path).map_err(path_error("read", path))?;
        let key = (
            meta.dev(),
            meta.ino(),
            meta.len(),
            meta.mtime(),
            meta.mtime_nsec(),
        );
        let cached = self.hashed.lock().get(&key).copied();
        if let Some(blob) = cached
            && blobs::stat(&self.layout, &blob.digest)?.is_some()
        {
            return Ok(blob);
        }
        let blob = blobs::hash(path)?;
        self.hashed.lock().insert(key, blob);
        Ok(blob)
    }

    /// Opens a blob for reading.
    pub fn open_blob(&self, digest: &Digest) -> Result<File, StoreError> {
        let path = self.layout.blob(digest);
        Ok(File::open(&path).map_err(path_error("open", path))?)
    }
}
