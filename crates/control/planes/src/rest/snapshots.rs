//! Routes that build, list, share, delete and compact snapshots, and that describe the store.
//!
//! A response never names a snapshot that does not exist for the actor.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use forkd_api::{
    CompactRequest, CreateSnapshot, ErrorCode, FsckReport, SnapshotDetail, SnapshotInfo,
    StoreUsage, UpdateSnapshot,
};
use forkd_store::Deletion;
use forkd_types::{InvalidEngine, Tag};
use serde::Deserialize;
use utoipa::IntoParams;

use super::owned::{OwnedSnapshot, VisibleSnapshot};
use super::sandboxes::checked_labels;
use forkd_edge::auth::Actor;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::{Body, Params};
use forkd_edge::idempotency;
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::branch::{claim, parse_tag};
use forkd_sandboxes::ops::build::{self, BuildRequest, Disk};
use forkd_sandboxes::ops::images;
use forkd_sandboxes::ops::snapshots;
use forkd_sandboxes::owners::Access;
use forkd_sandboxes::trace;

/// The longest `boot_wait_secs`, which has no other meaning here.
const MAX_BOOT_WAIT: u64 = 60;
/// How long a parent may take unless the request says otherwise, in seconds.
const READY_TIMEOUT: u64 = 300;
/// The longest it may say.
const MAX_READY_TIMEOUT: u64 = 3600;

/// Lists the snapshots of the owner.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots", responses(
    (status = 200, description = "Every snapshot, in the order of their names", body = Vec<SnapshotInfo>)
))]
pub async fn list(State(app): State<Arc<App>>, actor: Actor) -> Answer<Json<Vec<SnapshotInfo>>> {
    let all = snapshots::list(&app).await?.into_iter();
    let shown = all.filter_map(|info| shown_to(&app, &actor, info));
    Ok(Json(shown.collect()))
}

/// A snapshot as an actor sees it; none if it does not exist for the actor. Names of others' objects are left out.
fn shown_to(app: &App, actor: &Actor, mut info: SnapshotInfo) -> Option<SnapshotInfo> {
    let access = |tag: &str| match tag.parse() {
        Ok(tag) => app.owners.access(|owner| actor.owns(owner), &tag),
        Err(_) => Access::None,
    };
    match access(&info.tag) {
        Access::None => return None,
        Access::Use => info.branched_from = None,
        Access::Own => {}
    }
    info.parent_tag = info.parent_tag.filter(|tag| access(tag) > Access::None);
    Some(info)
}

/// Boots a parent, warms it up and freezes it.
#[utoipa::path(post, path = "/v1/snapshots", tag = "snapshots", request_body = CreateSnapshot,
    params(("idempotency-key" = Option<String>, Header, min_length = 1, max_length = 128, description = "Makes a repeated request harmless")), responses(
    (status = 201, description = "The snapshot is durable", body = SnapshotInfo),
    (status = 202, description = "It is being made; asked for with \"wait\": false", body = SnapshotInfo)
))]
pub async fn create(
    State(app): State<Arc<App>>,
    actor: Actor,
    headers: HeaderMap,
    Body(request): Body<CreateSnapshot>,
) -> Answer<Response> {
    let tag = parse_tag(&request.tag)?;
    check_files(&actor, &request)?;
    let wait = request.wait;
    let mut wish = build_request(request.clone(), &actor)?;
    wish.volumes = super::volumes::wishes(&app, &actor, &request.volumes)?;
    if let Disk::Image(name) = &wish.disk {
        let actor = actor.clone();
        images::check_visible(&app, name.clone(), move |owner| actor.owns(owner)).await?;
    }
    let owner = actor.owner.clone();
    let work = {
        let app = Arc::clone(&app);
        async move {
            let (status, info) = make(&app, tag, owner, wish, wait).await?;
            Ok((status, serde_json::to_value(info)))
        }
    };
    idempotency::once(&app.db, &actor, &headers, "build", &request, work).await
}

async fn make(
    app: &Arc<App>,
    tag: Tag,
    owner: String,
    wish: BuildRequest,
    wait: bool,
) -> Result<(StatusCode, SnapshotInfo), Error> {
    let claimed = claim(app, &tag, &owner, None).await?;
    let work = {
        let app = Arc::clone(app);
        // A task of its own: a client that goes away does not leave a parent half built.
        trace::spawn(async move { build::build(&app, wish, claimed).await })
    };
    if !wait && let Some(writing) = app.writing.get(&tag) {
        let info = snapshots::writing_info(app, &tag, &writing);
        return Ok((StatusCode::ACCEPTED, info));
    }
    let info = work.await.map_err(|_| Error::Task)??;
    Ok((StatusCode::CREATED, info))
}

/// A file of the host may hold what belongs to others: the disk of another snapshot, or the state database.
fn check_files(actor: &Actor, request: &CreateSnapshot) -> Result<(), Failure> {
    let files = [&request.rootfs, &request.kernel, &request.initramfs];
    if actor.is_admin() || files.iter().all(|file| file.is_none()) {
        return Ok(());
    }
    Err(Failure::new(
        ErrorCode::Forbidden,
        "only administrators may build from files of the host",
    )
    .with_hint("give the name of an image; GET /v1/images lists what is installed"))
}

fn build_request(request: CreateSnapshot, actor: &Actor) -> Result<BuildRequest, Failure> {
    let bad = |message: String| Failure::new(ErrorCode::InvalidRequest, message);
    if request.boot_wait_secs > MAX_BOOT_WAIT {
        return Err(bad(format!("boot_wait_secs is at most {MAX_BOOT_WAIT}")));
    }
    let timeout = request.ready_timeout_secs.unwrap_or(READY_TIMEOUT);
    if !(1..=MAX_READY_TIMEOUT).contains(&timeout) {
        return Err(bad(format!(
            "ready_timeout_secs is 1 to {MAX_READY_TIMEOUT}"
        )));
    }
    let disk = match (request.image, request.rootfs) {
        (Some(image), None) => Disk::Image(parse_tag(&image)?),
        (None, Some(path)) => Disk::File(absolute(path, "rootfs")?),
        _ => {
            return Err(bad("give exactly one of image and rootfs".into())
                .with_hint("GET /v1/images lists the images that are installed"));
        }
    };
    let memory = forkd_vmm_proto::MIN_MEMORY_MIB..=forkd_vmm_proto::MAX_MEMORY_MIB;
    if let Some(mib) = request.mem_size_mib
        && !memory.contains(&mib)
    {
        return Err(bad(format!(
            "mem_size_mib is {} to {}",
            memory.start(),
            memory.end()
        )));
    }
    let most = forkd_vmm_proto::MAX_VCPUS;
    if let Some(vcpus) = request.vcpus
        && !(1..=most).contains(&vcpus)
    {
        return Err(bad(format!("vcpus is 1 to {most}")));
    }
    let engine = request.engine.map(|name| name.parse()).transpose();
    Ok(BuildRequest {
        volumes: Vec::new(),
        disk,
        engine: engine.map_err(|error: InvalidEngine| bad(error.to_string()))?,
        kernel: request
            .kernel
            .map(|path| absolute(path, "kernel"))
            .transpose()?,
        initramfs: request
            .initramfs
            .map(|path| absolute(path, "initramfs"))
            .transpose()?,
        memory_mib: request.mem_size_mib,
        vcpus: request.vcpus,
        warmup: request.warmup,
        warmup_code: request.warmup_code,
        timeout: Duration::from_secs(timeout),
        labels: checked_labels(request.labels)?,
        owner: actor.owner.clone(),
    })
}

fn absolute(path: String, what: &str) -> Result<PathBuf, Failure> {
    let path = PathBuf::from(path);
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("{what} must be an absolute path on the daemon's host"),
        ))
    }
}

/// The treatment of snapshots that build on the one to delete.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct DeleteParams {
    /// Delete them too.
    #[serde(default)]
    cascade: bool,
    /// Leave them; they keep working.
    #[serde(default)]
    force: bool,
}

/// Deletes a snapshot. Cancels the build of a parent that boots.
#[utoipa::path(delete, path = "/v1/snapshots/{tag}", tag = "snapshots",
    params(("tag" = String, Path, description = "Its name"), DeleteParams), responses(
    (status = 204, description = "It is gone")
))]
pub async fn delete(
    State(app): State<Arc<App>>,
    actor: Actor,
    OwnedSnapshot(tag): OwnedSnapshot,
    Params(params): Params<DeleteParams>,
) -> Answer<StatusCode> {
    let deletion = match (params.cascade, params.force) {
        (true, true) => {
            return Err(Failure::new(
                ErrorCode::InvalidRequest,
                "cascade and force exclude each other",
            ));
        }
        (true, false) => Deletion::Cascade,
        (false, true) => Deletion::Force,
        (false, false) => Deletion::Single,
    };
    if deletion != Deletion::Force && !actor.is_admin() {
        check_dependents(&app, &actor, &tag).await?;
    }
    snapshots::delete(&app, tag, deletion).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Refuses to delete snapshots of others, and to name them, when they build on one of the actor.
async fn check_dependents(app: &Arc<App>, actor: &Actor, tag: &Tag) -> Result<(), Failure> {
    if !app.store.contains(tag) {
        return Ok(());
    }
    let dependents = snapshots::all_dependents(app, tag).await?;
    if dependents
        .iter()
        .all(|dependent| app.owners.access(|owner| actor.owns(owner), dependent) == Access::Own)
    {
        return Ok(());
    }
    Err(Failure::new(
        ErrorCode::HasDependents,
        format!("snapshots of other owners build on {tag}"),
    )
    .with_hint("force=true (--force) deletes this one; the others keep working"))
}

/// Shows a snapshot to every owner, or to its own only.
#[utoipa::path(patch, path = "/v1/snapshots/{tag}", tag = "snapshots", request_body = UpdateSnapshot,
    params(("tag" = String, Path, description = "Its name")), responses(
    (status = 200, description = "What is known", body = SnapshotDetail)
))]
pub async fn update(
    State(app): State<Arc<App>>,
    actor: Actor,
    OwnedSnapshot(tag): OwnedSnapshot,
    Body(request): Body<UpdateSnapshot>,
) -> Answer<Json<SnapshotDetail>> {
    // First, so that nothing is changed of a snapshot that does not exist.
    snapshots::detail(&app, tag.clone()).await?;
    if let Some(public) = request.public {
        snapshots::set_public(&app, &tag, public).await?;
    }
    detail_for(&app, &actor, tag).await
}

/// Everything about a snapshot, without the names of snapshots that do not exist for the actor.
async fn detail_for(app: &Arc<App>, actor: &Actor, tag: Tag) -> Answer<Json<SnapshotDetail>> {
    let mut detail = snapshots::detail(app, tag).await?;
    let shown = |tag: &String| {
        tag.parse()
            .is_ok_and(|tag| app.owners.access(|owner| actor.owns(owner), &tag) > Access::None)
    };
    detail.parent_tag = detail.parent_tag.filter(shown);
    detail.ancestors.retain(shown);
    detail.dependents.retain(shown);
    Ok(Json(detail))
}

/// Everything about one snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{tag}/info", tag = "snapshots",
    params(("tag" = String, Path, description = "Its name")), responses(
    (status = 200, description = "What is known", body = SnapshotDetail)
))]
pub async fn info(
    State(app): State<Arc<App>>,
    actor: Actor,
    VisibleSnapshot(tag): VisibleSnapshot,
) -> Answer<Json<SnapshotDetail>> {
    detail_for(&app, &actor, tag).await
}

/// Makes a snapshot without parents from one that has parents.
#[utoipa::path(post, path = "/v1/snapshots/{tag}/compact", tag = "snapshots", request_body = CompactRequest,
    params(("tag" = String, Path, description = "The snapshot to flatten")), responses(
    (status = 200, description = "The new snapshot", body = SnapshotInfo)
))]
pub async fn compact(
    State(app): State<Arc<App>>,
    actor: Actor,
    VisibleSnapshot(tag): VisibleSnapshot,
    Body(request): Body<CompactRequest>,
) -> Answer<Json<SnapshotInfo>> {
    let to = parse_tag(&request.to)?;
    Ok(Json(snapshots::compact(&app, tag, to, &actor.owner).await?))
}

/// Disk usage of the store.
#[utoipa::path(get, path = "/v1/store", tag = "store", responses(
    (status = 200, description = "Sizes", body = StoreUsage)
))]
pub async fn usage(State(app): State<Arc<App>>) -> Answer<Json<StoreUsage>> {
    Ok(Json(snapshots::usage(&app).await?))
}

/// How thorough a check is.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct FsckParams {
    /// Compute every digest again.
    #[serde(default)]
    deep: bool,
}

/// Looks for damage in the store.
#[utoipa::path(post, path = "/v1/store/fsck", tag = "store", params(FsckParams), responses(
    (status = 200, description = "What was found", body = FsckReport)
))]
pub async fn fsck(
    State(app): State<Arc<App>>,
    Params(params): Params<FsckParams>,
) -> Answer<Json<FsckReport>> {
    Ok(Json(snapshots::fsck(&app, params.deep).await?))
}
