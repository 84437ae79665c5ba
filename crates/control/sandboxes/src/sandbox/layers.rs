//! The writable layers of a sandbox's disks.
//!
//! A cut, a checkpoint and a roll-back each put new empty layers on the writable disks. The record names a layer before the VMM
//! hears of it ([`announce`]): if the daemon dies in between, an empty layer too many is harmless, one too few would lose
//! data. Layers that did not come into use are taken out again ([`withdraw`]).

use std::sync::Arc;

use forkd_store::BlobRef;
use forkd_vmm_proto::{Command, MAX_DISK_LAYERS};

use super::disk_budget;
use super::owner::SandboxOwner;
use crate::app::App;
use crate::error::Error;
use crate::launch::{FdList, NewDisk, NewLayer, VmFiles};
use crate::ops::compact::{merge_layers, open_blob};
use crate::state::{LayerRef, SandboxRecord};

/// The files that a new VM starts with.
pub(crate) fn vm_files(app: &App, record: &SandboxRecord) -> Result<VmFiles, Error> {
    let mut files = app.dirs.create(&record.id)?;
    files.layers = new_layers(app, record)?;
    Ok(files)
}

/// New, empty layers for the writable disks.
pub(crate) fn new_layers(app: &App, record: &SandboxRecord) -> Result<Vec<NewLayer>, Error> {
    let writable = record.disks.iter().filter(|disk| !disk.read_only).count() as u64;
    let used = disk_budget::measure(app, record);
    let limit = disk_budget::layer_limit(app.config.disk_limit_bytes, &used, writable);
    record
        .disks
        .iter()
        .enumerate()
        .filter(|(_, disk)| !disk.read_only)
        .map(|(slot, disk)| {
            let new = NewDisk {
                slot,
                size: disk.base.bytes,
            };
            let number = record.layer_number(disk);
            app.dirs.new_layer(&record.id, new, number, limit)
        })
        .collect()
}

/// Names new layers in the record, together with another change, before the VMM hears of them.
pub(super) async fn announce(
    owner: &SandboxOwner,
    layers: &[NewLayer],
    also: impl FnOnce(&mut SandboxRecord),
) -> Result<SandboxRecord, Error> {
    owner
        .save(|record| {
            record.add_layers(layers.iter().map(|layer| (layer.slot, &layer.name)));
            also(record);
        })
        .await
}

/// Takes layers out of the record that did not come into use, together with another change, and removes their files.
pub(super) async fn withdraw(
    owner: &SandboxOwner,
    unused: Vec<String>,
    also: impl FnOnce(&mut SandboxRecord),
) -> Result<(), Error> {
    owner
        .save(|record| {
            for disk in &mut record.disks {
                disk.layers
                    .retain(|layer| !matches!(layer, LayerRef::Own(name) if unused.contains(name)));
            }
            also(record);
        })
        .await?;
    remove_files(owner, unused).await
}

/// Removes the files of layers that the record does not name any more. The VMM has those it uses open.
pub(super) async fn remove_files(owner: &SandboxOwner, names: Vec<String>) -> Result<(), Error> {
    let dir = owner.app.dirs.vm(&owner.sandbox.id);
    owner
        .app
        .blocking(move |_| {
            for name in names {
                let path = dir.join(name);
                if let Err(error) = std::fs::remove_file(&path) {
                    tracing::warn!(path = %path.display(), %error, "not removed");
                }
            }
            Ok(())
        })
        .await
}

/// Merges the frozen layers of disks that have many. All but the top layer of each disk are content. A stack that cannot be
/// merged now stays as it is: it reads the same.
pub(super) async fn shorten(owner: &mut SandboxOwner) -> Result<(), Error> {
    let record = owner.sandbox.record();
    let writable = record
        .disks
        .iter()
        .enumerate()
        .filter(|(_, d)| !d.read_only);
    for (place, (slot, disk)) in (0..).zip(writable) {
        let frozen = disk.frozen();
        if frozen.len() <= MAX_DISK_LAYERS {
            continue;
        }
        match replace(owner, place, slot, frozen).await {
            Err(error) if owner.ended.is_some() => return Err(error),
            Err(error) => {
                tracing::warn!(sandbox = %record.id, slot, error = error.chain(), "disk layers not merged");
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

async fn replace(
    owner: &mut SandboxOwner,
    place: u8,
    slot: usize,
    frozen: Vec<BlobRef>,
) -> Result<(), Error> {
    let app = Arc::clone(&owner.app);
    let (merged, file) = app
        .blocking(move |app| {
            let merged = merge_layers(app, &frozen)?;
            let file = open_blob(app, &merged.blob)?;
            Ok((merged, file))
        })
        .await?;
    let mut fds = FdList::default();
    let layer = fds.push(&file);
    let fds = fds.finish()?;
    let command = Command::MergedLayer { disk: place, layer };
    owner.call(command, &fds).await?;
    let record = owner
        .save(|record| {
            if let Some(disk) = record.disks.get_mut(slot) {
                disk.layers
                    .retain(|layer| matches!(layer, LayerRef::Own(_)));
                disk.layers.insert(0, LayerRef::Blob(merged.blob));
            }
        })
        .await?;
    owner.lease = app.store.hold(record.blobs());
    Ok(())
}
