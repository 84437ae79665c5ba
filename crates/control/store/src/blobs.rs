//! Content by digest.

use std::fs::File;
use std::io;
use std::path::Path;

use forkd_types::{Digest, path_error};

use crate::durable;
use crate::error::StoreError;
use crate::layout::Layout;
use crate::manifest::BlobRef;
use crate::sparse::{Sizes, page_digest, sizes};

/// Hashes a file.
pub fn hash(path: &Path) -> Result<BlobRef, StoreError> {
    let file = File::open(path).map_err(path_error("open", path))?;
    let digest = page_digest(&file).map_err(path_error("read", path))?;
    let bytes = file.metadata().map_err(path_error("read", path))?.len();
    Ok(BlobRef { digest, bytes })
}

/// Gives a file its second name, that of its content. Nothing is durable yet.
///
/// A blob that is there already is the same content, if it has once been durable; else it may be what a power cut left.
pub fn link(
    layout: &Layout,
    path: &Path,
    blob: &BlobRef,
    was_durable: bool,
) -> Result<(), StoreError> {
    let name = layout.blob(&blob.digest);
    match std::fs::hard_link(path, &name) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => return Ok(other.map_err(path_error("link", path))?),
    }
    if was_durable || hash(&name)? == *blob {
        return Ok(());
    }
    std::fs::remove_file(&name).map_err(path_error("remove", &name))?;
    Ok(std::fs::hard_link(path, &name).map_err(path_error("link", path))?)
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
    match File::open(&path).and_then(|file| sizes(&file)) {
        Ok(sizes) => Ok(Some(sizes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(path_error("open", path)(error).into()),
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
