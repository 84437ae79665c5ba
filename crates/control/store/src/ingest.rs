//! Turning files into content.
//!
//! A VMM is not trusted once its guest may have taken it over, and it keeps the descriptors it was given. Hence the
//! rule of this module: **an inode that a VMM can write is never content.** Which function to call follows from who
//! can still write the file:
//!
//! | file | call | cost |
//! |---|---|---|
//! | written by a VMM, for a tag | [`Store::ingest`] | one copy, hashed on the way |
//! | written by a VMM, for children that start now | [`Store::freeze`] | a seal (memfd), a reflink, or one copy; no hash |
//! | written by the daemon or `forkd-image` alone | [`Store::ingest_own`] | one hash, a hard link |
//! | a file of the user, who may change it | [`Store::ingest_copy`] | one copy; nothing if it did not change since |
//!
//! Content that [`Store::freeze`] gave has no name on disk. `volatile.rs` keeps it by descriptor, and makes a blob of it
//! if a tag needs it.

use std::fs::{File, Metadata, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use forkd_types::{Digest, PathError, path_error};
use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals, ioctl_ficlone};

use crate::blobs;
use crate::digest::{copy_with_digest, page_digest};
use crate::draft::Draft;
use crate::error::StoreError;
use crate::lease::Lease;
use crate::manifest::BlobRef;
use crate::store::Store;

/// Nothing changes a file with these seals, not even a process that has it open for writing.
const IMMUTABLE: SealFlags = SealFlags::WRITE
    .union(SealFlags::GROW)
    .union(SealFlags::SHRINK);

/// A file that is now content.
#[derive(Debug)]
pub struct Ingested {
    pub blob: BlobRef,
    /// Keeps the blob until a manifest names it.
    pub lease: Lease,
}

impl Store {
    /// Copies a file into the store and gives the copy its digest as a name.
    ///
    /// The blob is a new inode. A process that has the source open for writing cannot reach it. The source keeps its name; the
    /// caller removes it. Nothing is synced: that comes with the first tag that names the blob.
    pub fn ingest(&self, path: &Path) -> Result<Ingested, StoreError> {
        let file = File::open(path).map_err(path_error("open", path))?;
        self.ingest_file(&file)
    }

    /// As [`Store::ingest`], for an open file. The file offset does not matter.
    pub fn ingest_file(&self, from: &File) -> Result<Ingested, StoreError> {
        let epoch = self.syncer.epoch();
        let (draft, to) = Draft::create(&self.layout.staging())?;
        let copied = |error| PathError {
            action: "copy into",
            path: draft.path().to_owned(),
            source: error,
        };
        let digest = if ioctl_ficlone(&to, from).is_ok() {
            page_digest(&to)
        } else {
            copy_with_digest(from, &to)
        }
        .map_err(copied)?;
        to.set_permissions(Permissions::from_mode(0o400))
            .map_err(copied)?;
        let bytes = to.metadata().map_err(copied)?.len();
        self.enter(draft, BlobRef { digest, bytes }, epoch)
    }

    /// Makes a file content by a second name. The caller guarantees that no other process has it open for writing, and
    /// that the file is never changed in place. The file must lie on the file system of the store.
    pub fn ingest_own(&self, path: &Path) -> Result<Ingested, StoreError> {
        let before = std::fs::metadata(path).map_err(path_error("read", path))?;
        if let Some(known) = self.known(&before) {
            return Ok(known);
        }
        let epoch = self.syncer.epoch();
        let blob = blobs::hash(path)?;
        let ingested = match self.present(&blob)? {
            Some(present) => present,
            None => self.enter(Draft::link(&self.layout.staging(), path)?, blob, epoch)?,
        };
        let after = std::fs::metadata(path).map_err(path_error("read", path))?;
        self.remember(&before, &after, blob);
        Ok(ingested)
    }

    /// As [`Store::ingest`], for a file that stays where it is and is probably the same as last time: if it has not
    /// changed since, nothing is read.
    pub fn ingest_copy(&self, file: &File) -> Result<Ingested, StoreError> {
        let meta = || {
            file.metadata()
                .map_err(path_error("look at a file for", self.layout.staging()))
        };
        let before = meta()?;
        if let Some(known) = self.known(&before) {
            return Ok(known);
        }
        let ingested = self.ingest_file(file)?;
        self.remember(&before, &meta()?, ingested.blob);
        Ok(ingested)
    }

    /// Gives a read-only descriptor with the content of `file` that nothing can change any more, for children that
    /// start at once. It has no name and no digest, is not durable, and is gone when its last descriptor is closed.
    ///
    /// A memfd (see [`volatile_file`]) is sealed, which also stops a process that has it open for writing. Any other
    /// file, or a memfd that is still mapped for writing, is copied to a new inode on the file system of the store; on a
    /// file system with reflinks the two share their blocks.
    pub fn freeze(&self, file: &File) -> Result<File, StoreError> {
        let staging = self.layout.staging();
        if is_sealed(file) || fcntl_add_seals(file, IMMUTABLE | SealFlags::SEAL).is_ok() {
            return Ok(reopen(file).map_err(path_error("reopen a memfd for", staging))?);
        }
        let (draft, to) = Draft::create(&staging)?;
        forkd_os::sparse::copy(file, &to).map_err(path_error("copy into", draft.path()))?;
        Ok(File::open(draft.path()).map_err(path_error("open", draft.path()))?)
    }

    /// Opens a blob, or volatile content, for reading.
    pub fn open_blob(&self, digest: &Digest) -> Result<File, StoreError> {
        if let Some(file) = self.open_volatile(digest)? {
            return Ok(file);
        }
        let path = self.layout.blob(digest);
        Ok(File::open(&path).map_err(path_error("open", path))?)
    }

    /// Opens a blob and compares all of its content with its digest. Meant for small files that decide what a VMM
    /// does, such as the device state and the page index. Volatile content has no digest, and no process can change it.
    pub fn open_verified(&self, blob: &BlobRef) -> Result<File, StoreError> {
        if let Some(file) = self.open_volatile(&blob.digest)? {
            return Ok(file);
        }
        let file = self.open_blob(&blob.digest)?;
        let path = || self.layout.blob(&blob.digest);
        let found = page_digest(&file).map_err(path_error("read", path()))?;
        let bytes = file.metadata().map_err(path_error("read", path()))?.len();
        if found != blob.digest || bytes != blob.bytes {
            return Err(StoreError::Damaged {
                digest: blob.digest,
            });
        }
        Ok(file)
    }

    /// Gives a draft its name as content, or finds that the content is there already.
    /// `written` is the epoch before the draft was written.
    fn enter(&self, draft: Draft, blob: BlobRef, written: u64) -> Result<Ingested, StoreError> {
        let entered = (|| {
            self.step()?;
            let _commit = self.commit();
            let ingested = self.held(blob);
            let epoch = self.syncer.epoch();
            let (trusted, lost) = {
                let blobs = self.blobs.lock();
                let before = blobs.epoch(&blob.digest);
                let lost = before.is_some_and(|before| before != epoch);
                (blobs.is_durable(&blob.digest), lost)
            };
            let moved = blobs::enter(&self.layout, draft.path(), &blob, trusted, lost)?;
            if moved && let Some(sizes) = blobs::stat(&self.layout, &blob.digest)? {
                self.blobs.lock().insert(blob.digest, sizes, written);
            }
            self.step()?;
            Ok((ingested, moved))
        })();
        let moved = matches!(entered, Ok((_, true)));
        if moved || self.is_dead() {
            draft.forget();
        }
        entered.map(|(ingested, _)| ingested)
    }

    /// A blob that is there and durable. Checked before a file is linked: a link changes the change time of the file,
    /// and with it the key by which the next request finds the digest.
    fn present(&self, blob: &BlobRef) -> Result<Option<Ingested>, StoreError> {
        let _commit = self.commit();
        if !self.blobs.lock().is_durable(&blob.digest) {
            return Ok(None);
        }
        let sizes = blobs::stat(&self.layout, &blob.digest)?;
        let present = sizes.is_some_and(|sizes| sizes.logical == blob.bytes);
        Ok(present.then(|| self.held(*blob)))
    }

    fn held(&self, blob: BlobRef) -> Ingested {
        let lease = self.leases.hold([blob.digest]);
        Ingested { blob, lease }
    }

    /// The blob of a file that was ingested before and has not changed since.
    fn known(&self, meta: &Metadata) -> Option<Ingested> {
        let blob = self.hashed.lock().get(meta)?;
        let _commit = self.commit();
        let found = blobs::stat(&self.layout, &blob.digest).ok()??;
        (found.logical == blob.bytes).then(|| self.held(blob))
    }

    fn remember(&self, before: &Metadata, after: &Metadata, blob: BlobRef) {
        self.hashed.lock().insert(before, after, blob);
    }
}

/// A new memfd that can be sealed: the target of a cut whose children start at once. Its pages count as memory of the
/// process that writes them.
pub fn volatile_file(name: &str) -> std::io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(memfd_create(name, flags)?.into())
}

fn is_sealed(file: &File) -> bool {
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(IMMUTABLE))
}

/// A new read-only descriptor of the same file.
fn reopen(file: &File) -> std::io::Result<File> {
    use std::os::fd::AsRawFd;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
