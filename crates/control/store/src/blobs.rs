//! Content by digest.

use std::fs::File;
use std::io;
use std::path::Path;

use forkd_types::{Digest, path_error};

use crate::digest::page_digest;
use crate::durable;
use crate::error::StoreError;
use crate::layout::Layout;
use crate::manifest::BlobRef;
use crate::sparse::Sizes;

/// Hashes a file.
pub fn hash(path: &Path) -> Result<BlobRef, StoreError> {
    let file = File::open(path).map_err(path_error("open", path))?;
    let digest = page_digest(&file).map_err(path_error("read", path))?;
    let bytes = file.metadata().map_err(path_error("read", path))?.len();
    Ok(BlobRef { digest, bytes })
}

/// Renames a draft to the name of its content. Nothing is durable yet. False if the blob is there already: then the
/// draft stays.
///
/// A blob that has been durable is the content its name says. Any other may be the remains of a power cut: its content
/// is compared, and the draft replaces it if it differs.
pub fn enter(
    layout: &Layout,
    draft: &Path,
    blob: &BlobRef,
    was_durable: bool,
) -> Result<bool, StoreError> {
    let name = layout.blob(&blob.digest);
    match durable::rename_new(draft, &name) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => {
            other.map_err(path_error("rename to", name))?;
            return Ok(true);
        }
    }
    if was_durable || hash(&name)? == *blob {
        return Ok(false);
    }
    std::fs::rename(draft, &name).map_err(path_error("rename to", name))?;
    Ok(true)
}

/// Makes the content of blobs durable, and that they are there.
pub fn sync(layout: &Layout, digests: &[Digest]) -> Result<(), StoreError> {
    for digest in digests {
        let path = layout.blob(digest);
        File::open(&path)
            .and_then(|file| file.sync_all())
            .map_err(path_error("sync", path))?;
    }
    Ok(durable::sync_dir(&layout.blobs())?)
}

/// How big a blob is; `None` if there is no such blob.
pub fn stat(layout: &Layout, digest: &Digest) -> Result<Option<Sizes>, StoreError> {
    let path = layout.blob(digest);
    match std::fs::symlink_metadata(&path) {
        Ok(meta) => Ok(Some(meta.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(path_error("look at", path)(error).into()),
    }
}

/// Every blob there is. Names that are no digest are left out.
pub fn list(layout: &Layout) -> Result<Vec<Digest>, StoreError> {
    let dir = layout.blobs();
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&dir).map_err(path_error("read", &dir))? {
        let entry = entry.map_err(path_error("read", &dir))?;
        let name = entry.file_name();
        if let Some(digest) = name
            .to_str()
            .and_then(|name| format!("b3:{name}").parse().ok())
        {
            all.push(digest);
        }
    }
    all.sort();
    Ok(all)
}
