//! Merging the layers of a snapshot into one.
//!
//! [`flatten_memory`] and [`flatten_disks`] write new content to the store and leave the old layers untouched. Both
//! skip memory and disks that have one layer already.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use forkd_api::ErrorCode;
use forkd_formats::page_map::{Extent, PageMap};
use forkd_store::{BlobRef, Ingested, Manifest, MergeError};
use forkd_types::PAGE_SIZE;

use crate::app::App;
use crate::error::Error;

/// The largest index there can be, with room to spare.
const MAX_INDEX: u64 = 1 << 20;

/// Writes all of memory into one new layer; `None` if it is one already.
pub fn flatten_memory(app: &App, manifest: &Manifest) -> Result<Option<Ingested>, Error> {
    let Some(index) = &manifest.memory.index else {
        return Ok(None);
    };
    let open = |blob| open_blob(app, blob);
    if index.bytes > MAX_INDEX {
        return Err(Error::refused(
            ErrorCode::SnapshotBroken,
            "its page index is too large",
        ));
    }
    let mut bytes = vec![0; usize::try_from(index.bytes).unwrap_or(0)];
    open(index)?
        .read_exact_at(&mut bytes, 0)
        .map_err(Error::io("read", app.store.layout().blob(&index.digest)))?;
    let map = PageMap::decode(&bytes).map_err(|error| {
        Error::refused(
            ErrorCode::SnapshotBroken,
            format!("its page index is damaged: {error}"),
        )
    })?;
    let layers = manifest
        .memory
        .layers
        .iter()
        .map(open)
        .collect::<Result<Vec<File>, _>>()?;
    let staging = app
        .store
        .stage()
        .map_err(Error::store("no place to write"))?;
    let path = staging.file("memory");
    let write = || -> io::Result<()> {
        let out = File::create(&path)?;
        out.set_len(u64::from(manifest.memory_mib) << 20)?;
        for extent in map.extents() {
            copy_extent(&layers, extent, &out)?;
        }
        Ok(())
    };
    write().map_err(Error::io("write", &path))?;
    app.store
        .ingest_own(&path)
        .map(Some)
        .map_err(Error::store("the flat memory could not be stored"))
}

/// Merges the layers of every disk into one new layer; `None` where there is at most one already.
pub fn flatten_disks(app: &App, manifest: &Manifest) -> Result<Vec<Option<Ingested>>, Error> {
    let many = |disk: &forkd_store::DiskManifest| disk.layers.len() > 1;
    manifest
        .disks
        .iter()
        .map(|disk| {
            many(disk)
                .then(|| merge_layers(app, &disk.layers))
                .transpose()
        })
        .collect()
}

/// Makes one layer of many, the oldest first.
pub fn merge_layers(app: &App, layers: &[BlobRef]) -> Result<Ingested, Error> {
    let files = layers
        .iter()
        .map(|blob| open_blob(app, blob))
        .collect::<Result<Vec<_>, _>>()?;
    let staging = app
        .store
        .stage()
        .map_err(Error::store("no place to write"))?;
    let path = staging.file("layer");
    let out = staging
        .create("layer")
        .map_err(Error::store("no place to write"))?;
    forkd_store::merge_layers(&files, &out).map_err(|error| match error {
        MergeError::Io(error) => Error::io("write", &path)(error),
        damaged => Error::refused(
            ErrorCode::SnapshotBroken,
            format!("its disk layers cannot be merged: {damaged}"),
        ),
    })?;
    app.store
        .ingest_own(&path)
        .map_err(Error::store("the merged disk layer could not be stored"))
}

/// Opens a layer in the store.
pub fn open_blob(app: &App, blob: &BlobRef) -> Result<File, Error> {
    app.store
        .open_blob(&blob.digest)
        .map_err(Error::store("a layer cannot be opened"))
}

/// Copies the pages of an extent that are not zero.
fn copy_extent(layers: &[File], extent: &Extent, out: &File) -> io::Result<()> {
    let layer = usize::try_from(extent.layer)
        .ok()
        .and_then(|at| layers.get(at))
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no such layer"))?;
    forkd_store::copy_part(
        layer,
        u64::from(extent.layer_first) * PAGE_SIZE,
        out,
        u64::from(extent.first) * PAGE_SIZE,
        u64::from(extent.count) * PAGE_SIZE,
    )
}
