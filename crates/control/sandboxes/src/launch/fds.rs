//! Descriptors that travel with a message to the VMM.
//!
//! [`SnapshotFiles`] opens the files of a snapshot once for all children of a request. [`check_budget`] refuses a
//! snapshot with more layers than a restore can send, before the snapshot is made.

use std::fs::File;
use std::os::fd::BorrowedFd;

use forkd_store::{Manifest, Store};
use forkd_vmm_proto::{MAX_FDS, MemoryImage, PageIndex, TooManyFds, restore_fds};

use crate::error::Error;
use crate::touched::{self, Touched};

/// The descriptors of one message.
pub type FdList<'a> = forkd_vmm_proto::FdList<BorrowedFd<'a>>;

/// Refuses a snapshot with more layers than a restore can hand over, before it is made.
pub fn check_budget(manifest: &Manifest) -> Result<(), Error> {
    let disks = manifest.disks.iter().map(|disk| disk.layers.len());
    let count = restore_fds(manifest.memory.layers.len(), disks);
    if count > MAX_FDS {
        return Err(TooManyFds { count }.into());
    }
    Ok(())
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
    pub fn open(store: &Store, sets: &Touched, manifest: &Manifest) -> Result<Self, Error> {
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
            touched: sets.get(&touched::key(manifest)),
        })
    }

    /// No run has recorded yet which pages children touch first.
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

#[cfg(test)]
mod tests {
    use forkd_api::ErrorCode;
    use forkd_store::{BlobRef, DiskManifest};
    use forkd_types::Digest;

    use super::*;

    #[test]
    fn a_snapshot_that_could_not_be_restored_is_refused_when_it_is_made() {
        let blob = BlobRef {
            digest: Digest([0; 32]),
            bytes: 4096,
        };
        let manifest = |frozen: usize| -> Manifest {
            let disk = DiskManifest {
                base: blob,
                layers: vec![blob; frozen],
                read_only: false,
                serial: "root".into(),
            };
            serde_json::from_value(serde_json::json!({
                "schema": forkd_store::SCHEMA, "tag": "a", "created_at_unix": 1, "engine": "forkd",
                "memory_mib": 1, "vcpus": 1, "cpu": "host", "state": blob,
                "memory": {"layers": vec![blob; 32], "index": blob}, "disks": vec![disk; 4],
                "source": forkd_store::Source::default(), "origin": {"kind": "import"},
                "versions": forkd_store::Versions::default(),
            }))
            .unwrap()
        };
        check_budget(&manifest(16)).unwrap();
        let refused = check_budget(&manifest(30)).unwrap_err();
        assert_eq!(refused.code(), ErrorCode::LimitReached);
    }
}
