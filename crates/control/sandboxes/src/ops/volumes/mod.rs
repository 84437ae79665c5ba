//! Creating volumes, giving them to sandboxes, and taking back what sandboxes wrote.
//!
//! [`give`] adds volumes to the record of a new sandbox, [`attach`] and [`mount`] to its VM and its guest. [`take_back`]
//! is called after every end of a VM; it may be called again.

mod commit;
mod content;
mod import;

use std::sync::Arc;
use std::time::Duration;

use forkd_agent_client::Client;
use forkd_api::{ErrorCode, VolumeInfo, VolumeMode};
use forkd_guest_proto::{HoldVolumeRequest, MountVolumeRequest};
use forkd_store::{BlobRef, Lease, Manifest};
use forkd_types::{SandboxId, Tag};

pub use commit::commit;
pub use import::Import;

use crate::agent_limits;
use crate::app::App;
use crate::clock;
use crate::error::{Error, chain};
use crate::launch::{self, VmFiles};
use crate::ops::compact;
use crate::ops::spawn::CreateRequest;
use crate::sandbox::SandboxHandle;
use crate::sandbox::owner::SandboxOwner;
use crate::state::{OnExpiry, SandboxRecord, VOLUME_VERSION, VolumeRecord, VolumeUse};
use crate::volumes::{MOST_LAYERS, VolumeWish};

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
    app.volumes.check_free(&name)?;
    let bytes = size_mib << 20;
    let base = app
        .blocking(move |app| content::empty_disk(app, bytes))
        .await?;
    enter_new(app, name, owner, &base.blob, true).await
}

/// Enters a volume whose base is durable.
async fn enter_new(
    app: &Arc<App>,
    name: Tag,
    owner: String,
    base: &BlobRef,
    clean: bool,
) -> Result<VolumeInfo, Error> {
    let record = VolumeRecord {
        version: VOLUME_VERSION,
        id: rand::random(),
        name,
        owner,
        created_at_unix: clock::unix(),
        bytes: base.bytes,
        base: *base,
        layers: Vec::new(),
        generation: 1,
        clean,
        writer: None,
    };
    let info = record.info();
    app.volumes.add(&app.store, record).await?;
    Ok(info)
}

/// Refuses wishes that the snapshot or the request cannot have, before anything starts.
pub fn check(request: &CreateRequest, manifest: &Manifest) -> Result<(), Error> {
    let (wishes, count) = (&request.volumes, request.count);
    let bad = |message: String| Error::refused(ErrorCode::InvalidRequest, message);
    for (at, wish) in wishes.iter().enumerate() {
        let earlier = wishes.get(..at).unwrap_or_default();
        let inherited = manifest.volumes.iter().any(|used| used.path == wish.path);
        if inherited || earlier.iter().any(|other| other.path == wish.path) {
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
        if wish.mode == VolumeMode::Rw && request.on_expiry == OnExpiry::Suspend {
            return Err(Error::hinted(
                ErrorCode::InvalidRequest,
                format!(
                    "a sandbox that writes volume {} cannot be suspended when its time is over",
                    wish.name
                ),
                "let the sandbox be deleted then, or use the mode clone",
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

/// Refuses wishes that a new parent cannot have. Its snapshot holds clones, so none is written.
pub fn check_parent(wishes: &[VolumeWish], record: &SandboxRecord) -> Result<(), Error> {
    if wishes.len() > usize::from(record.spare_disks) {
        return Err(Error::refused(
            ErrorCode::Unsupported,
            format!(
                "a parent on the engine {} has room for {} volumes, {} were asked for",
                record.engine,
                record.spare_disks,
                wishes.len()
            ),
        ));
    }
    let written = wishes.iter().find(|wish| wish.mode == VolumeMode::Rw);
    match written {
        None => Ok(()),
        Some(wish) => Err(Error::hinted(
            ErrorCode::InvalidRequest,
            format!("a snapshot does not write volume {}", wish.name),
            "use the mode clone or ro: every child gets a private copy",
        )),
    }
}

/// Adds volumes to the records of new sandboxes. A volume in the mode `rw` is claimed for the one sandbox of the request.
/// The leases keep the content.
pub async fn give(
    app: &Arc<App>,
    wishes: &[VolumeWish],
    records: &mut [SandboxRecord],
) -> Result<Vec<Arc<Lease>>, Error> {
    let mut leases = Vec::with_capacity(wishes.len());
    for wish in wishes {
        match find(app, wish, records).await {
            Ok((volume, lease)) => {
                leases.push(lease);
                for record in records.iter_mut() {
                    enter(app, wish, &volume, record);
                }
            }
            Err(error) => {
                for record in records.iter() {
                    take_back(app, record, Run::Never).await;
                }
                return Err(error);
            }
        }
    }
    Ok(leases)
}

/// The volume of a wish, with few layers and held.
async fn find(
    app: &Arc<App>,
    wish: &VolumeWish,
    records: &[SandboxRecord],
) -> Result<(VolumeRecord, Arc<Lease>), Error> {
    let user = &records.first().ok_or(Error::Task)?.id;
    if wish.mode == VolumeMode::Rw {
        app.volumes.claim(&app.store, &wish.name, user).await?;
    }
    let (volume, lease) = app.volumes.held(&wish.name)?;
    let found = match readable(&volume, wish) {
        Ok(()) => shortened(app, user, volume, lease).await,
        Err(error) => Err(error),
    };
    if found.is_err() && wish.mode == VolumeMode::Rw {
        let freed = app.volumes.release(&app.store, user, &wish.name, None);
        freed.await?;
    }
    found
}

fn enter(app: &App, wish: &VolumeWish, volume: &VolumeRecord, record: &mut SandboxRecord) {
    let (disk, used) = volume.used(wish, record.disks.len());
    let layers = volume.layers.iter().map(|layer| app.store.physical(layer));
    record.inherited_disk_bytes += layers.sum::<u64>();
    record.disks.push(disk);
    record.volumes.push(used);
    record.spare_disks = record.spare_disks.saturating_sub(1);
}

/// A file system whose journal has to be replayed cannot be mounted for reading only.
fn readable(volume: &VolumeRecord, wish: &VolumeWish) -> Result<(), Error> {
    if wish.mode != VolumeMode::Ro || volume.clean {
        return Ok(());
    }
    Err(Error::hinted(
        ErrorCode::WrongState,
        format!(
            "the last sandbox that wrote volume {} ended without unmounting it",
            volume.name
        ),
        "start a sandbox with the volume in the mode rw once: the mount repairs the file system",
    ))
}

/// The volume with few layers. The stored volume gets the merged layer too, unless another sandbox writes it.
async fn shortened(
    app: &Arc<App>,
    user: &SandboxId,
    mut volume: VolumeRecord,
    lease: Arc<Lease>,
) -> Result<(VolumeRecord, Arc<Lease>), Error> {
    if volume.layers.len() <= MOST_LAYERS {
        return Ok((volume, lease));
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
    app.volumes
        .shorten(&app.store, user, &volume, merged.blob)
        .await?;
    volume.layers = vec![merged.blob];
    let lease = Arc::new(app.store.hold(volume.blobs()));
    Ok((volume, lease))
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

/// Mounts the volumes that were attached to a new sandbox. Those of its snapshot are mounted already.
pub async fn mount(client: &Client, record: &SandboxRecord, from_slot: usize) -> Result<(), Error> {
    let_go(client, record).await;
    let new = record.volumes.iter().filter(|used| used.slot >= from_slot);
    for used in new {
        let serial = record.disks.get(used.slot).map(|disk| disk.serial.clone());
        let request = MountVolumeRequest {
            serial: serial.unwrap_or_default(),
            path: used.path.clone(),
            read_only: used.mode == VolumeMode::Ro,
        };
        let mounted = client
            .by(agent_limits::answer())
            .mount_volume(request)
            .await;
        mounted.map_err(Error::agent(format!(
            "volume {} could not be mounted at {}",
            used.name, used.path
        )))?;
    }
    Ok(())
}

/// Lets writes to volumes go on in a guest that was restored, rolled back or adopted: a commit may have held them at that
/// moment. A guest whose writes are not held changes nothing.
pub async fn let_go(client: &Client, record: &SandboxRecord) {
    for used in &record.volumes {
        if let Err(error) = hold(client, used, false).await {
            tracing::debug!(sandbox = %record.id, volume = %used.name, error = chain(&error), "not let go");
        }
    }
}

/// Asks the guest to write out the volumes that it writes, before its VM ends. A guest that does not answer leaves file
/// systems whose journal is replayed at the next mount.
pub async fn settle(sandbox: &SandboxHandle) {
    let record = sandbox.record();
    if record.written_volumes().next().is_none() {
        return;
    }
    let holding = async {
        let client = sandbox.connect(HOLD).await;
        let client = client.map_err(|error| sandbox.unreachable(&error))?;
        for used in record.written_volumes() {
            let held = hold(&client, used, true).await;
            held.map_err(Error::agent("a volume was not written out"))?;
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

/// Brings the file system of a volume into the state of a clean unmount and holds every write to it, or lets writes go on.
async fn hold(
    client: &Client,
    used: &VolumeUse,
    held: bool,
) -> Result<(), forkd_agent_client::Error> {
    let request = HoldVolumeRequest {
        path: used.path.clone(),
        held,
    };
    client.by(agent_limits::answer()).hold_volume(request).await
}

/// Whether the VM of a sandbox ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    /// No client was told of the sandbox. Nothing that it wrote is kept.
    Never,
    /// Its process has ended.
    Over,
}

/// Takes over what a sandbox wrote to its volumes, and ends its right to write. Returns false after a failure that may
/// pass, such as a full disk: the sandbox is still the writer then, and its files must stay.
pub async fn take_back(app: &Arc<App>, record: &SandboxRecord, run: Run) -> bool {
    let mut all = true;
    for used in record.written_volumes() {
        if !app.volumes.is_writer(&record.id, used) {
            continue;
        }
        if let Err(error) = take_one(app, record, used, run).await {
            all = false;
            tracing::error!(sandbox = %record.id, volume = %used.name, error = error.chain(), "the volume was not taken back");
        }
    }
    all
}

async fn take_one(
    app: &Arc<App>,
    record: &SandboxRecord,
    used: &VolumeUse,
    run: Run,
) -> Result<(), Error> {
    let disk = match run {
        Run::Never => None,
        Run::Over => content::last_disk(record, used.slot),
    };
    let id = record.id.clone();
    let content = app
        .blocking(move |app| match disk {
            Some(disk) => content::of_disk(app, &id, &disk),
            None => Ok(None),
        })
        .await?;
    if run == Run::Over && content.is_none() {
        tracing::error!(sandbox = %record.id, volume = %used.name, "the last changes of the volume are lost: a layer is missing");
    }
    let volumes = &app.volumes;
    volumes
        .release(&app.store, &record.id, &used.name, content)
        .await
}
