//! Unpacking an artifact into the store.
//!
//! Documents are checked first: format, signature, CPU, room. Then packs arrive, and every frame, pack and blob is compared
//! with its digest. The tag appears by the usual publish at the end, so a stream that breaks off leaves nothing.
//!
//! Content that is here already is used only if the actor may see a snapshot that has it. Otherwise a client could name
//! the digest of another owner's content and get that content.

use std::collections::BTreeSet;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use forkd_api::{ErrorCode, EventKind, MemoryWish, SnapshotInfo, UnpackPlan, UnpackWay};
use forkd_hub::HubError;
use forkd_hub::archive::{PackHead, StreamReader};
use forkd_hub::documents::Documents;
use forkd_hub::known::Known;
use forkd_hub::unpack::{self as hub, Plan};
use forkd_store::{Lease, Manifest};
use forkd_types::{Digest, Tag};

use super::portable;
use crate::app::App;
use crate::error::Error;
use crate::ops::build::{self, BuildRequest, Disk};
use crate::ops::writing::Claimed;
use crate::ops::{branch, snapshots};

/// Bytes of local content that are searched for known pages.
const SEARCH: u64 = 16 << 30;
/// Longest boot of a parent whose memory does not fit.
const BOOT: Duration = Duration::from_secs(300);

/// A checked request to unpack an artifact.
#[derive(Debug, Clone)]
pub struct UnpackRequest {
    /// The tag to make; that of the publisher if missing.
    pub tag: Option<Tag>,
    pub owner: String,
    pub memory: MemoryWish,
    /// Snapshots whose content the actor may use.
    pub visible: Vec<Tag>,
}

/// The documents of an artifact, checked against this host.
struct Checked {
    documents: Documents,
    way: UnpackWay,
    reason: Option<String>,
    signer: Option<String>,
}

/// Content that is here already, and what is missing.
struct Here {
    plan: Plan,
    known: Known,
    lease: Lease,
}

/// Says how an artifact would be unpacked. The stream holds its documents and no packs.
pub async fn check(
    app: &Arc<App>,
    request: UnpackRequest,
    stream: impl Read + Send + 'static,
) -> Result<UnpackPlan, Error> {
    let slot = app.limits.transfer()?;
    app.blocking(move |app| {
        let _slot = slot;
        let (documents, _, _) = StreamReader::open(stream).map_err(unreadable())?;
        let checked = judge(app, documents, request.memory)?;
        let here = look(app, &checked, &request.visible)?;
        let documents = &checked.documents;
        let packs = documents.artifact.packs.iter().zip(&here.plan.needed);
        Ok(UnpackPlan {
            name: documents.config.name.clone(),
            digest: documents.artifact.digest.to_string(),
            way: checked.way,
            reason: checked.reason,
            packs: packs
                .filter(|(_, needed)| **needed)
                .map(|(pack, _)| pack.digest.to_string())
                .collect(),
            fetch_bytes: here.plan.fetch_bytes,
            total_bytes: documents.artifact.packs.iter().map(|pack| pack.size).sum(),
            disk_bytes: here.plan.disk_bytes,
            memory_mib: documents.config.memory_mib,
            vcpus: documents.config.vcpus,
            signer: checked.signer,
        })
    })
    .await
}

/// Unpacks an artifact and gives it a tag.
pub async fn unpack(
    app: &Arc<App>,
    request: UnpackRequest,
    stream: impl Read + Send + 'static,
) -> Result<SnapshotInfo, Error> {
    app.check_open()?;
    let slot = app.limits.transfer()?;
    app.limits.store_room(&app.store)?;
    let wish = request.memory;
    let (checked, reader, next) = app
        .blocking(move |app| {
            let (documents, reader, next) = StreamReader::open(stream).map_err(unreadable())?;
            Ok((judge(app, documents, wish)?, reader, next))
        })
        .await?;
    let tag = match &request.tag {
        Some(tag) => tag.clone(),
        None => branch::parse_tag(&checked.documents.config.name)?,
    };
    let claim = branch::claim(app, &tag, &request.owner, None).await?;
    let made = match checked.way {
        UnpackWay::Load => load(app, checked, request, reader, next, claim).await,
        UnpackWay::Boot => boot(app, checked, request, reader, next, claim).await,
    };
    drop(slot);
    made
}

async fn load(
    app: &Arc<App>,
    checked: Checked,
    request: UnpackRequest,
    reader: StreamReader<impl Read + Send + 'static>,
    next: Option<PackHead>,
    claim: Claimed,
) -> Result<SnapshotInfo, Error> {
    let tag = claim.tag().clone();
    let info = {
        let tag = tag.clone();
        app.blocking(move |app| {
            let manifest = manifest(&checked, tag.clone())?;
            let _leases = receive(app, &checked, &request.visible, reader, next)?;
            let stored = app.store.publish(manifest);
            let published =
                stored.map_err(Error::store(format!("snapshot {tag} was not stored")))?;
            Ok(snapshots::info(app, &published.manifest))
        })
        .await?
    };
    // First: a listener may use the tag at once.
    drop(claim);
    app.events.tell(EventKind::SnapshotReady, &tag, None);
    Ok(info)
}

/// Takes the base of the disk and boots the parent here.
async fn boot(
    app: &Arc<App>,
    checked: Checked,
    request: UnpackRequest,
    reader: StreamReader<impl Read + Send + 'static>,
    next: Option<PackHead>,
    claim: Claimed,
) -> Result<SnapshotInfo, Error> {
    let config = checked.documents.config.clone();
    let owner = request.owner.clone();
    let leases = app
        .blocking(move |app| receive(app, &checked, &request.visible, reader, next))
        .await?;
    let base = config.bases().next().and_then(|at| config.blobs.get(at));
    let base = base.ok_or_else(|| no_disk(&config.name))?;
    let wish = BuildRequest {
        volumes: Vec::new(),
        disk: Disk::Stored {
            path: app.store.layout().blob(&base.digest),
            name: config.source.image.clone(),
        },
        kernel: None,
        initramfs: None,
        memory_mib: Some(config.memory_mib),
        vcpus: Some(config.vcpus),
        warmup: Vec::new(),
        warmup_code: None,
        timeout: BOOT,
        labels: std::collections::BTreeMap::new(),
        owner,
        engine: None,
    };
    let made = build::build(app, wish, claim).await;
    drop(leases);
    made
}

fn unreadable() -> impl FnOnce(HubError) -> Error {
    Error::hub("the artifact cannot be read")
}

fn no_disk(name: &str) -> Error {
    Error::refused(
        ErrorCode::SnapshotIncompatible,
        format!("{name} has no disk that a parent could be booted from"),
    )
}

/// Checks signature and compatibility, and decides what is taken.
fn judge(app: &App, documents: Documents, wish: MemoryWish) -> Result<Checked, Error> {
    let refused = || Error::hub("the artifact is refused");
    let signer = match &app.config.hub_signers {
        Some(signers) => Some(signers.check(&documents).map_err(refused())?),
        None => None,
    };
    let fits = portable::host().check(&documents.config);
    let (way, reason) = match (wish, fits) {
        (MemoryWish::Auto | MemoryWish::Require, Ok(())) => (UnpackWay::Load, None),
        (MemoryWish::Require, Err(error)) => return Err(refused()(error)),
        (MemoryWish::Auto, Err(error)) if !documents.config.booted => return Err(refused()(error)),
        (MemoryWish::Auto, Err(error)) => (UnpackWay::Boot, Some(error.to_string())),
        (MemoryWish::Never, _) => (UnpackWay::Boot, Some("the request leaves it out".into())),
    };
    if way == UnpackWay::Boot && (!documents.config.booted || documents.config.disks.is_empty()) {
        return Err(Error::hinted(
            ErrorCode::SnapshotIncompatible,
            format!(
                "{} was branched from a running machine: its disk alone is not the machine",
                documents.config.name
            ),
            "pull the parent that it was branched from",
        ));
    }
    Ok(Checked {
        documents,
        way,
        reason,
        signer,
    })
}

/// The manifest that the artifact becomes, checked as one that was read from disk.
fn manifest(checked: &Checked, tag: Tag) -> Result<Manifest, Error> {
    let config = &checked.documents.config;
    let digest = checked.documents.artifact.digest.to_string();
    let invalid =
        |problem: String| Error::hub("the artifact is refused")(HubError::invalid(problem));
    let manifest = portable::manifest(tag.clone(), config, digest, checked.signer.clone())
        .ok_or_else(|| invalid("its configuration names no engine or a missing blob".into()))?;
    Manifest::parse(&tag, &manifest.to_bytes())
        .map_err(|error| invalid(format!("its machine is out of range: {error}")))?;
    Ok(manifest)
}

/// Finds content that is here already.
fn look(app: &App, checked: &Checked, visible: &[Tag]) -> Result<Here, Error> {
    let documents = &checked.documents;
    let config = &documents.config;
    let mut theirs: Vec<(u64, Arc<Manifest>)> = visible
        .iter()
        .filter_map(|tag| app.store.manifest(tag).ok())
        .map(|manifest| (manifest.created_at_unix, manifest))
        .collect();
    theirs.sort_by_key(|(created, _)| std::cmp::Reverse(*created));
    let blobs: Vec<_> = theirs.iter().flat_map(|(_, found)| found.blobs()).collect();
    let here: BTreeSet<Digest> = blobs.iter().map(|blob| blob.digest).collect();
    let lease = app.store.hold(here.iter().copied());
    let present = |blob: &forkd_hub::config::Blob| {
        here.contains(&blob.digest)
            && app
                .store
                .open_blob(&blob.digest)
                .is_ok_and(|file| file.metadata().is_ok_and(|about| about.len() == blob.bytes))
    };
    let wanted: Vec<usize> = match checked.way {
        UnpackWay::Load => (0..config.blobs.len()).collect(),
        UnpackWay::Boot => config.bases().take(1).collect(),
    };
    let missing: Vec<usize> = wanted
        .into_iter()
        .filter(|at| config.blobs.get(*at).is_some_and(|blob| !present(blob)))
        .collect();
    let pages = hub::wanted_pages(documents, &missing);
    let mut budget = SEARCH;
    let mut files = Vec::new();
    for blob in blobs {
        let size = app.store.physical(&blob);
        if pages.is_empty() || size > budget {
            break;
        }
        budget -= size;
        files.extend(app.store.open_blob(&blob.digest).ok());
    }
    let known =
        Known::find(files, &pages).map_err(Error::io("search", app.store.layout().blobs()))?;
    Ok(Here {
        plan: hub::plan(documents, missing, &known),
        known,
        lease,
    })
}

/// Receives all missing content. The leases keep it until a manifest names it.
fn receive(
    app: &App,
    checked: &Checked,
    visible: &[Tag],
    mut reader: StreamReader<impl Read>,
    next: Option<PackHead>,
) -> Result<Vec<Lease>, Error> {
    let failed = || Error::hub("the artifact was not unpacked");
    let documents = &checked.documents;
    let Here { plan, known, lease } = look(app, checked, visible)?;
    check_room(app, &plan)?;
    let staging = app.store.stage();
    let staging = staging.map_err(Error::store("no place to write"))?;
    let never = AtomicBool::new(false);
    let made = hub::unpack(
        documents,
        &plan,
        &known,
        &mut reader,
        next,
        staging.path(),
        &never,
    )
    .map_err(failed())?;
    let mut leases = vec![lease];
    for new in made {
        let expected = documents.config.blobs.get(new.number);
        let expected = expected.ok_or(Error::Task)?;
        let ingested = app.store.ingest_own(&new.path);
        let ingested = ingested.map_err(Error::store("content was not stored"))?;
        if ingested.blob.digest != expected.digest || ingested.blob.bytes != expected.bytes {
            return Err(failed()(HubError::Digest {
                what: "a file of the snapshot".into(),
                expected: expected.digest.to_string(),
                found: ingested.blob.digest.to_string(),
            }));
        }
        leases.push(ingested.lease);
    }
    Ok(leases)
}

/// Refuses before the first byte when the content cannot fit.
fn check_room(app: &App, plan: &Plan) -> Result<(), Error> {
    let usage = app.store.usage();
    let usage = usage.map_err(Error::store("the store cannot be measured"))?;
    if plan.disk_bytes > usage.free {
        return Err(Error::hinted(
            ErrorCode::NoSpace,
            format!(
                "the snapshot needs {} bytes on disk, {} are free",
                plan.disk_bytes, usage.free
            ),
            "delete snapshots (forkd rmi) or make room on the disk",
        ));
    }
    let after = usage.physical.saturating_add(plan.disk_bytes);
    match app.store.limit() {
        Some(limit) if after > limit => Err(Error::hinted(
            ErrorCode::LimitReached,
            format!("snapshots would take {after} bytes on disk, {limit} is the limit"),
            "delete snapshots (forkd rmi), or start the daemon with a higher --store-limit-mib",
        )),
        _ => Ok(()),
    }
}
