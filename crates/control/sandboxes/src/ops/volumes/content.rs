//! The content of volumes: empty file systems, and the layers that sandboxes leave. All of it is durable.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use forkd_api::ErrorCode;
use forkd_formats::layer::{HEADER_LEN, LayerHeader};
use forkd_store::BlobRef;
use forkd_types::SandboxId;

use crate::app::App;
use crate::error::Error;
use crate::state::{DiskStack, LayerRef};
use crate::volumes::Content;

/// Programs that make an empty file system.
const MKE2FS: [&str; 2] = ["/usr/sbin/mke2fs", "/sbin/mke2fs"];
/// Where the superblock of ext4 lies, and the features in it that a mount must know.
const SUPERBLOCK: u64 = 1024;
const INCOMPATIBLE: usize = 0x60;
/// The journal has to be replayed.
const NEEDS_RECOVERY: u32 = 0x4;

/// An empty ext4 file system as durable content.
pub fn empty_disk(app: &App, bytes: u64) -> Result<forkd_store::Ingested, Error> {
    let staging = app.store.stage();
    let staging = staging.map_err(Error::store("no place to make a volume"))?;
    let path = staging.file("volume.ext4");
    let file = File::create(&path).map_err(Error::io("create", &path))?;
    file.set_len(bytes).map_err(Error::io("create", &path))?;
    drop(file);
    make_file_system(&path)?;
    durable(app, &path)
}

fn make_file_system(path: &Path) -> Result<(), Error> {
    let program = MKE2FS.iter().find(|program| Path::new(program).exists());
    let program = program.ok_or_else(|| {
        Error::hinted(
            ErrorCode::Unsupported,
            "this host has no mke2fs, which makes the file system of a volume",
            "install the package e2fsprogs",
        )
    })?;
    let done = Command::new(program)
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-E", "nodiscard"])
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(Error::io("run", program))?;
    if !done.status.success() {
        let text: String = String::from_utf8_lossy(&done.stderr)
            .chars()
            .take(300)
            .collect();
        return Err(Error::refused(
            ErrorCode::Internal,
            format!("mke2fs failed: {}", text.trim()),
        ));
    }
    Ok(())
}

/// Enters a file as content that survives a power failure.
fn durable(app: &App, path: &Path) -> Result<forkd_store::Ingested, Error> {
    let failed = || Error::store("the volume was not stored");
    let ingested = app.store.ingest(path).map_err(failed())?;
    app.store.sync([ingested.blob.digest]).map_err(failed())?;
    Ok(ingested)
}

/// The layers of a disk as durable content. Layers that were not used are left out.
pub fn of_disk(app: &App, id: &SandboxId, disk: &DiskStack) -> Result<Content, Error> {
    let dir = app.dirs.vm(id);
    let mut layers = Vec::new();
    let (mut new, mut leases) = (Vec::new(), Vec::new());
    for layer in &disk.layers {
        match layer {
            LayerRef::Blob(blob) => {
                let blob = match app.store.ingest_volatile(&blob.digest) {
                    Ok(Some(stored)) => {
                        new.push(stored.blob.digest);
                        leases.push(stored.lease);
                        stored.blob
                    }
                    Ok(None) => *blob,
                    Err(error) => return Err(Error::store("a layer was not stored")(error)),
                };
                layers.push(blob);
            }
            LayerRef::Own(name) => {
                let path = dir.join(name);
                let file = File::open(&path).map_err(Error::io("open", &path))?;
                if is_untouched(&file).map_err(Error::io("read", &path))? {
                    continue;
                }
                let stored = app.store.ingest_file(&file);
                let stored = stored.map_err(Error::store("a layer was not stored"))?;
                new.push(stored.blob.digest);
                layers.push(stored.blob);
                leases.push(stored.lease);
            }
        }
    }
    app.store
        .sync(new)
        .map_err(Error::store("the volume was not stored"))?;
    let clean = is_clean(app, &disk.base, &layers)?;
    Ok(Content {
        base: disk.base,
        layers,
        clean,
        leases,
    })
}

/// Whether a layer has neither data nor a map.
fn is_untouched(file: &File) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    // The header is one page; a map or data takes more.
    Ok(file.metadata()?.blocks() * 512 <= HEADER_LEN as u64)
}

/// Whether the file system was unmounted or held, by its superblock.
pub fn is_clean(app: &App, base: &BlobRef, layers: &[BlobRef]) -> Result<bool, Error> {
    let open = |blob: &BlobRef| {
        let file = app.store.open_blob(&blob.digest);
        file.map_err(Error::store("a volume cannot be read"))
    };
    let mut superblock = [0; 1024];
    let unreadable = |error| Error::io("read", "a volume")(error);
    for layer in layers.iter().rev() {
        let file = open(layer)?;
        let mut page = [0; HEADER_LEN];
        file.read_exact_at(&mut page, 0).map_err(unreadable)?;
        let Ok(header) = LayerHeader::decode(&page) else {
            return Ok(false);
        };
        let mut map = [0; 1];
        file.read_exact_at(&mut map, header.map_offset())
            .map_err(unreadable)?;
        if map[0] & 3 != 0 {
            file.read_exact_at(&mut superblock, header.data_offset() + SUPERBLOCK)
                .map_err(unreadable)?;
            return Ok(!needs_recovery(&superblock));
        }
    }
    open(base)?
        .read_exact_at(&mut superblock, SUPERBLOCK)
        .map_err(unreadable)?;
    Ok(!needs_recovery(&superblock))
}

fn needs_recovery(superblock: &[u8; 1024]) -> bool {
    let field = superblock.get(INCOMPATIBLE..INCOMPATIBLE + 4);
    let field = field.and_then(|bytes| bytes.try_into().ok());
    field.is_some_and(|bytes| u32::from_le_bytes(bytes) & NEEDS_RECOVERY != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn an_empty_file_system_is_clean_and_a_dirty_one_is_told_from_it() {
        let dir = tempfile::tempdir().unwrap();
        let (app, _endings) = App::open(Config::below(dir.path())).unwrap();
        let base = empty_disk(&app, 16 << 20).unwrap();
        assert!(is_clean(&app, &base.blob, &[]).unwrap());
        let mut superblock = [0; 1024];
        assert!(!needs_recovery(&superblock));
        superblock[INCOMPATIBLE] = 0x46;
        assert!(needs_recovery(&superblock));
    }
}
