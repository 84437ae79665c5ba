//! Descriptors that travel with a message.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use forkd_store::{Manifest, Store};
use forkd_vmm_proto::{FdIndex, MAX_FDS, MemoryImage, PageIndex};

use crate::error::Error;
use crate::touched::Touched;

/// Collects descriptors and gives each its place.
#[derive(Debug, Default)]
pub struct FdList<'a> {
    fds: Vec<BorrowedFd<'a>>,
}

impl<'a> FdList<'a> {
    /// Adds a descriptor.
    pub fn push(&mut self, fd: &'a impl AsFd) -> FdIndex {
        self.fds.push(fd.as_fd());
        FdIndex(u8::try_from(self.fds.len() - 1).unwrap_or(u8::MAX))
    }

    /// All of them, if they fit into one message.
    pub fn finish(self) -> Result<Vec<BorrowedFd<'a>>, Error> {
        if self.fds.len() > MAX_FDS {
            return Err(Error::hinted(
                forkd_api::ErrorCode::LimitReached,
                format!(
                    "the snapshot has {} layers and other files, {MAX_FDS} is the limit",
                    self.fds.len()
                ),
                "compact the snapshot first: POST /v1/snapshots/{tag}/compact",
            ));
        }
        Ok(self.fds)
    }
}

/// The files of a snapshot, opened once for all children of a request.
#[derive(Debug)]
pub struct SnapshotFiles {
    pub(super) state: File,
    pub(super) memory: Vec<File>,
    pub(super) index: Option<File>,
    pub(super) disks: Vec<DiskFiles>,
    /// The pages that children touch first, once that is known.
    pub(super) touched: Option<File>,
}

/// The files of one disk.
#[derive(Debug)]
pub(super) struct DiskFiles {
    pub base: File,
    pub layers: Vec<File>,
}

impl SnapshotFiles {
    /// Opens what the manifest names.
    pub fn open(store: &Store, touched: &Touched, manifest: &Manifest) -> Result<Self, Error> {
        let failed = || format!("snapshot {} cannot be opened", manifest.tag);
        let open = |blob: &forkd_store::BlobRef| {
            store
                .open_blob(&blob.digest)
                .map_err(Error::store(failed()))
        };
        // These two say what the VMM does with all the rest, and are small.
        let verified =
            |blob: &forkd_store::BlobRef| store.open_verified(blob).map_err(Error::store(failed()));
        Ok(Self {
            state: verified(&manifest.state)?,
            memory: manifest
                .memory
                .layers
                .iter()
                .map(open)
                .collect::<Result<_, _>>()?,
            index: manifest.memory.index.as_ref().map(verified).transpose()?,
            disks: manifest
                .disks
                .iter()
                .map(|disk| {
                    Ok(DiskFiles {
                        base: open(&disk.base)?,
                        layers: disk.layers.iter().map(open).collect::<Result<_, _>>()?,
                    })
                })
                .collect::<Result<_, Error>>()?,
            touched: touched.get(&manifest.state.digest),
        })
    }

    /// Nobody has recorded which pages children touch first.
    pub fn lacks_touched(&self) -> bool {
        self.touched.is_none()
    }

    /// Guest memory as the VMM takes it.
    pub(super) fn memory_image<'a>(&'a self, fds: &mut FdList<'a>) -> MemoryImage {
        MemoryImage {
            layers: self.memory.iter().map(|file| fds.push(file)).collect(),
            index: match &self.index {
                Some(file) => PageIndex::File(fds.push(file)),
                None => PageIndex::Identity,
            },
        }
    }
}
