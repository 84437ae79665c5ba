//! Keeping stacks of disk layers short: every layer is a descriptor in the VMM of each child.

use std::sync::Arc;

use forkd_store::BlobRef;
use forkd_vmm_proto::{Command, MAX_DISK_LAYERS};

use super::driver::{Ended, Owned};
use crate::compact::{merge_layers, open_blob};
use crate::db::LayerRef;
use crate::error::Error;
use crate::launch::FdList;

/// Merges the frozen layers of disks that have many. All but the top layer of each disk are content. If it
/// cannot be done now, the stack stays as it is: it reads the same.
pub(super) async fn shorten(owned: &mut Owned, ended: &mut Option<Ended>) -> Result<(), Error> {
    let record = owned.sandbox.record();
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
        match replace(owned, ended, place, slot, frozen).await {
            Err(error) if ended.is_some() => return Err(error),
            Err(error) => {
                tracing::warn!(sandbox = %record.id, slot, error = error.chain(), "disk layers not merged");
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

async fn replace(
    owned: &mut Owned,
    ended: &mut Option<Ended>,
    place: u8,
    slot: usize,
    frozen: Vec<BlobRef>,
) -> Result<(), Error> {
    let app = Arc::clone(&owned.app);
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
    owned.call(ended, command, &fds).await?;
    let record = owned.sandbox.update(|record| {
        if let Some(disk) = record.disks.get_mut(slot) {
            disk.layers
                .retain(|layer| matches!(layer, LayerRef::Own(_)));
            disk.layers.insert(0, LayerRef::Blob(merged.blob));
        }
    });
    owned.lease = app.store.hold(record.blobs());
    app.db.put_sandboxes(vec![record]).await?;
    Ok(())
}
