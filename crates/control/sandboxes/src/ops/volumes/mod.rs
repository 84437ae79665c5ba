//! Creating volumes, giving them to sandboxes, and taking back what sandboxes wrote.
//!
//! [`give`] adds volumes to the record of a new sandbox, [`attach`] and [`mount`] to its VM and its guest. [`take_back`]
//! is called after every end of a VM; it may be called again.

mod commit;
mod content;

use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorCode, VolumeInfo, VolumeMode};
use forkd_guest_proto::{HoldRequest, MountRequest};
use forkd_store::{Lease, Manifest};
use forkd_types::{SandboxId, Tag};

pub use commit::commit;

use crate::agent_limits;
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::launch::{self, VmFiles};
use crate::ops::compact;
use crate::sandbox::SandboxHandle;
use crate::sandbox::owner::SandboxOwner;
use crate::state::{SandboxRecord, VOLUME_VERSION, VolumeRecord, VolumeUse};
use crate::volumes::{MERGE_AT, VolumeWish};

/// Sizes of volumes, in MiB.
pub const SIZES: std::ops::RangeInclusive<u64> = 8..=1 << 20;
/// How long a guest may take to write a volume out before its VM ends.
const HOLD: Duration = Duration::from_secs(10);

/// Creates an empty volume.
pub async fn create(
    app: &Arc<App>,
    name: Tag,
    size_mib: u64,
    owner: String,
) -> Result<VolumeInfo, Error> {
    app.check_open()?;
    if !SIZES.contains(&size_mib) {
        return Err(Error::refused(
            ErrorCode::InvalidRequest,
            format!(
                "size_mib is {} to {}, not {size_mib}",
                SIZES.start(),
                SIZES.end()
            ),
        ));
    }
    app.limits.store_room(&app.store)?;
    // A name that is taken is refused before a file system is made.
    if app.volumes.get(&name, |_| true).is_ok() {
        return Err(Error::refused(
            ErrorCode::AlreadyExists,
            format!("there is already a volume {name}"),
        ));
    }
    let bytes = size_mib << 20;
    let base = app
        .blocking(move |app| content::empty_disk(app, bytes))
        .await?;
    let record = VolumeRecord {
        version: VOLUME_VERSION,
        name,
        owner,
        created_at_unix: clock::unix(),
        bytes,
        base: base.blob,
        layers: Vec::new(),
        generation: 1,
        clean: true,
        writer: None,
    };
    let info = record.info();
    app.volumes.add(&app.store, record).await?;
    Ok(info)
}

/// Refuses wishes that the snapshot or the request cannot have, before anything starts.
pub fn check(wishes: &[VolumeWish], manifest: &Manifest, count: usize) -> Result<(), Error> {
    let bad = |message: String| Error::refused(ErrorCode::InvalidRequest, message);
    if wishes.is_empty() {
        return Ok(());
    }
    for (at, wish) in wishes.iter().enumerate() {
        let earlier = wishes.get(..at).unwrap_or_default();
        if earlier.iter().any(|other| other.path == wish.path) {
            return Err(bad(format!("two volumes are mounted at {}", wish.path)));
        }
        let shared = wish.mode == VolumeMode::Rw
            && (count > 1 || earlier.iter().any(|o| o.name == wish.name));
        if shared {
            return Err(Error::hinted(
                ErrorCode::InvalidRequest,
                format!("volume {} is writable in one sandbox only", wish.name),
                "use the mode clone for several children",
            ));
        }
    }
    if wishes.len() > usize::from(manifest.spare_disks) {
        return Err(Error::hinted(
            ErrorCode::Unsupported,
            format!(
                "snapshot {} has room for {} volumes, {} were asked for",
                manifest.tag,
                manifest.spare_disks,
                wishes.len()
            ),
            "freeze the parent again with this version of forkd, on the engine forkd",
        ));
    }
    Ok(())
}

/// Adds volumes to the record of a new sandbox. Volumes in the mode `rw` are claimed for it. The lease keeps the content.
pub async fn give(
    app: &Arc<App>,
    wishes: &[VolumeWish],
    record: &mut SandboxRecord,
) -> Result<Lease, Error> {
    let mut used_blobs = Vec::new();
    for wish in wishes {
        let volume = match wish.mode {
            VolumeMode::Rw => app.volumes.claim(&app.store, &wish.name, &record.id).await,
            VolumeMode::Clone | VolumeMode::Ro => app.volumes.get(&wish.name, |_| true),
        };
        let volume = volume.and_then(|volume| readable(volume, wish));
        let volume = match volume {
            Ok(volume) => volume,
            Err(error) => {
                take_back(app, record, false).await;
                return Err(error);
            }
        };
        let merged = short(app, volume).await;
        let (volume, _merged) = match merged {
            Ok(volume) => volume,
            Err(error) => {
                let freed = app
                    .volumes
                    .release(&app.store, &record.id, &wish.name, None);
                freed.await?;
                take_back(app, record, false).await;
                return Err(error);
            }
        };
        let (disk, used) = volume.used(wish, record.disks.len());
        used_blobs.push(app.store.hold(volume.blobs()));
        let layers = volume.layers.iter().map(|layer| app.store.physical(layer));
        record.inherited_disk_bytes += layers.sum::<u64>();
        record.disks.push(disk);
        record.volumes.push(used);
        record.spare_disks = record.spare_disks.saturating_sub(1);
    }
    let all = used_blobs.iter().flat_map(|lease| lease.digests().to_vec());
    Ok(app.store.hold(all))
}

/// A file system whose journal has to be replayed cannot be mounted for reading only.
fn readable(volume: VolumeRecord, wish: &VolumeWish) -> Result<VolumeRecord, Error> {
    if wish.mode == VolumeMode::Ro && !volume.clean {
        return Err(Error::hinted(
            ErrorCode::WrongState,
            format!(
                "the last sandbox that wrote volume {} ended without unmounting it",
                volume.name
            ),
            "start a sandbox with the volume in the mode rw once: its file system is repaired then",
        ));
    }
    Ok(volume)
}

/// A volume with few layers. The stored volume stays as it is: it reads the same.
async fn short(
    app: &Arc<App>,
    mut volume: VolumeRecord,
) -> Result<(VolumeRecord, Option<Lease>), Error> {
    if volume.layers.len() <= MERGE_AT {
        return Ok((volume, None));
    }
    let layers = volume.layers.clone();
    let merged = app
        .blocking(move |app| {
            let merged = compact::merge_layers(app, &layers)?;
            let synced = app.store.sync([merged.blob.digest]);
            synced.map_err(Error::store("the merged layers were not stored"))?;
            Ok(merged)
        })
        .await?;
    volume.layers = vec![merged.blob];
    Ok((volume, Some(merged.lease)))
}

/// Gives the VM of a new sandbox its volumes. The disks of the snapshot come first.
pub async fn attach(owner: &SandboxOwner, from_slot: usize, files: &VmFiles) -> Result<(), Error> {
    let record = owner.sandbox.record();
    for (slot, disk) in record.disks.iter().enumerate().skip(from_slot) {
        let disk = disk.clone();
        let opened = owner.app.blocking(move |app| launch::open_disk(app, &disk));
        launch::attach(&owner.vmm, slot, &opened.await?, files).await?;
    }
    Ok(())
}

/// Ends the rights of sandboxes that do not exist any more. A daemon that died has recorded a writer before it recorded
/// the sandbox.
pub async fn free_orphans(app: &Arc<App>, unfinished: &[SandboxId]) {
    for (name, writer) in app.volumes.written() {
        if app.sandboxes.get(&writer).is_ok() || unfinished.contains(&writer) {
            continue;
        }
        let freed = app.volumes.release(&app.store, &writer, &name, None).await;
        if let Err(error) = freed {
            tracing::error!(volume = %name, error = error.chain(), "the volume was not freed");
        }
    }
}

/// Mounts the volumes that were attached to a new sandbox.
pub async fn mount(sandbox: &SandboxHandle, from_slot: usize) -> Result<(), Error> {
    let record = sandbox.record();
    if record.volumes.is_empty() {
        return Ok(());
    }
    let client = sandbox.agent().await?;
    for used in &record.volumes {
        if used.slot < from_slot {
            // The cut may have happened while a commit held the writes of the source.
            let _ = client.by(agent_limits::answer()).hold(go_on(used)).await;
            continue;
        }
        let serial = record.disks.get(used.slot).map(|disk| disk.serial.clone());
        let request = MountRequest {
            serial: serial.unwrap_or_default(),
            path: used.path.clone(),
            read_only: used.mode == VolumeMode::Ro,
        };
        let mounted = client.by(agent_limits::answer()).mount(request).await;
        mounted.map_err(Error::agent(format!(
            "volume {} could not be mounted at {}",
            used.name, used.path
        )))?;
    }
    Ok(())
}

fn go_on(used: &VolumeUse) -> HoldRequest {
    HoldRequest {
        path: used.path.clone(),
        held: false,
    }
}

/// Lets the writes of an adopted guest go on: a daemon that died may have held them for a commit.
pub async fn unhold(sandbox: &SandboxHandle) {
    let record = sandbox.record();
    for used in &record.volumes {
        if let Ok(client) = sandbox.agent().await {
            // A file system that is not held refuses, which is fine.
            let _ = client.by(agent_limits::answer()).hold(go_on(used)).await;
        }
    }
}

/// Asks the guest to write out the volumes that it writes, before its VM ends. A guest that does not answer leaves file
/// systems whose journal is replayed at the next mount.
pub async fn settle(sandbox: &SandboxHandle) {
    let record = sandbox.record();
    let paths: Vec<String> = writes(&record).map(|used| used.path.clone()).collect();
    if paths.is_empty() {
        return;
    }
    let holding = async {
        let client = sandbox.agent().await?;
        for path in paths {
            let request = HoldRequest { path, held: true };
            client
                .by(agent_limits::answer())
                .hold(request)
                .await
                .map_err(Error::agent("a volume was not written out"))?;
        }
        Ok::<_, Error>(())
    };
    match tokio::time::timeout(HOLD, holding).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::warn!(sandbox = %sandbox.id, error = error.chain(), "volumes");
        }
        Err(_) => tracing::warn!(sandbox = %sandbox.id, "the guest does not write its volumes out"),
    }
}

fn writes(record: &SandboxRecord) -> impl Iterator<Item = &VolumeUse> {
    let used = record.volumes.iter();
    used.filter(|used| used.mode == VolumeMode::Rw)
}

/// Takes over what a sandbox wrote to its volumes. Its VM has ended, or never ran (`ran` is false). A failure leaves the
/// sandbox the writer, and its files in place.
pub async fn take_back(app: &Arc<App>, record: &SandboxRecord, ran: bool) -> bool {
    let mut all = true;
    for used in writes(record) {
        let disk = record.disks.get(used.slot).filter(|_| ran).cloned();
        let id = record.id.clone();
        let content = app.blocking(move |app| {
            disk.map(|disk| content::of_disk(app, &id, &disk))
                .transpose()
        });
        let released = match content.await {
            Ok(content) => {
                let volumes = &app.volumes;
                volumes
                    .release(&app.store, &record.id, &used.name, content)
                    .await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = released {
            all = false;
            tracing::error!(sandbox = %record.id, volume = %used.name, error = error.chain(), "the volume was not taken back");
        }
    }
    all
}
