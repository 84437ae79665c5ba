//! The content of volumes: empty file systems, and the layers that sandboxes leave. All of it is durable.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use forkd_api::ErrorCode;
use forkd_formats::layer::{HEADER_LEN, LayerHeader};
use forkd_os::sparse::DataRanges;
use forkd_store::{BlobRef, DiskManifest, Lease};
use forkd_types::SandboxId;

use crate::app::App;
use crate::error::Error;
use crate::state::{DiskStack, LayerRef, SandboxRecord};
use crate::volumes::Content;

/// Programs that make an empty file system.
const MKE2FS: [&str; 2] = ["/usr/sbin/mke2fs", "/sbin/mke2fs"];
/// The file is new and has holes. Without the second word the kernel of a guest would write all tables of inodes.
const NEW_FILE: &str = "nodiscard,assume_storage_prezeroed=1";
/// Where the superblock of ext4 lies, and the features in it that a mount must know.
const SUPERBLOCK: u64 = 1024;
const INCOMPATIBLE: usize = 0x60;
/// Where the superblock has its magic number, and the number.
const MAGIC_AT: u64 = 0x38;
const MAGIC: [u8; 2] = [0x53, 0xef];
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
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-E", NEW_FILE])
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

/// Enters a file of the daemon as content that survives a power failure.
pub fn durable(app: &App, path: &Path) -> Result<forkd_store::Ingested, Error> {
    let failed = || Error::store("the volume was not stored");
    let ingested = app.store.ingest_own(path).map_err(failed())?;
    app.store.sync([ingested.blob.digest]).map_err(failed())?;
    Ok(ingested)
}

/// The disk of a sandbox whose VM has ended. If a roll-back was under way, the VMM may have written the newest layer over
/// either state of the disk, so the disk is that of the checkpoint.
pub fn last_disk(record: &SandboxRecord, slot: usize) -> Option<DiskStack> {
    let mut disk = record.disks.get(slot)?.clone();
    if let Some(target) = &record.rolling_back {
        let checkpoint = record.checkpoints.iter().find(|c| c.name == *target)?;
        disk.layers.clone_from(checkpoint.disks.get(slot)?);
    }
    Some(disk)
}

/// The layers of a disk as durable content, or `None` if a layer is missing. Layers that were not used are left out.
pub fn of_disk(app: &App, id: &SandboxId, disk: &DiskStack) -> Result<Option<Content>, Error> {
    let dir = app.dirs.vm(id);
    let mut layers = Vec::new();
    let mut leases = vec![app.store.hold([disk.base.digest])];
    for layer in &disk.layers {
        let blob = match layer {
            LayerRef::Blob(blob) => stored(app, blob, &mut leases)?,
            LayerRef::Own(name) => {
                let path = dir.join(name);
                let file = match File::open(&path) {
                    Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                    file => file.map_err(Error::io("open", &path))?,
                };
                if is_untouched(&file).map_err(Error::io("read", &path))? {
                    continue;
                }
                let stored = app.store.ingest_file(&file);
                let stored = stored.map_err(Error::store("a layer was not stored"))?;
                leases.push(stored.lease);
                Some(stored.blob)
            }
        };
        let Some(blob) = blob else {
            return Ok(None);
        };
        layers.push(blob);
    }
    durable_disk(app, disk.base, layers, leases).map(Some)
}

/// The layers of a cut as durable content.
pub fn of_cut(app: &App, disk: &DiskManifest) -> Result<Content, Error> {
    let mut leases = vec![app.store.hold([disk.base.digest])];
    let mut layers = Vec::new();
    for layer in &disk.layers {
        layers.push(stored(app, layer, &mut leases)?.ok_or(Error::Task)?);
    }
    durable_disk(app, disk.base, layers, leases)
}

/// A layer as content with a file in the store. `None` if the content does not exist any more.
fn stored(app: &App, blob: &BlobRef, leases: &mut Vec<Lease>) -> Result<Option<BlobRef>, Error> {
    let copied = app.store.ingest_volatile(&blob.digest);
    if let Some(copied) = copied.map_err(Error::store("a layer was not stored"))? {
        leases.push(copied.lease);
        return Ok(Some(copied.blob));
    }
    leases.push(app.store.hold([blob.digest]));
    Ok(app.store.open_blob(&blob.digest).is_ok().then_some(*blob))
}

fn durable_disk(
    app: &App,
    base: BlobRef,
    layers: Vec<BlobRef>,
    leases: Vec<Lease>,
) -> Result<Content, Error> {
    app.store
        .sync(layers.iter().map(|layer| layer.digest))
        .map_err(Error::store("the volume was not stored"))?;
    let clean = is_clean(app, &base, &layers)?;
    Ok(Content {
        base,
        layers,
        clean,
        leases,
    })
}

/// Whether a layer has an empty map: it hides nothing that lies below it.
fn is_untouched(file: &File) -> std::io::Result<bool> {
    let mut page = [0; HEADER_LEN];
    file.read_exact_at(&mut page, 0)?;
    let header = LayerHeader::decode(&page).map_err(std::io::Error::other)?;
    let map = header.map_offset()..header.data_offset();
    let mut written = DataRanges::new(file, map);
    Ok(written.next().transpose()?.is_none())
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

/// Whether an image holds an ext4 file system.
pub fn is_ext4(image: &File) -> std::io::Result<bool> {
    let mut magic = [0; 2];
    image.read_exact_at(&mut magic, SUPERBLOCK + MAGIC_AT)?;
    Ok(magic == MAGIC)
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
