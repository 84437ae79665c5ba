//! Routes that fetch, list, describe and remove images, and those about operations that go on after their request.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use forkd_api::{
    ErrorCode, FetchImage, ImageDetail, ImageInfo, OperationInfo, PrunedImages, PullPolicy,
    RegistryCredential,
};
use forkd_formats::image_cli::FetchCredential;
use serde::Deserialize;
use utoipa::IntoParams;

use forkd_edge::auth::Actor;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::{Body, Chunks, Params, PathTag};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::branch::parse_tag;
use forkd_sandboxes::ops::images::{self, FetchWish, Operation};
use forkd_sandboxes::owners::Access;

/// Size of the disk unless a request says otherwise.
const DISK_MIB: u32 = 8192;
const DISK_RANGE: std::ops::RangeInclusive<u32> = 64..=1 << 20;
/// Names below `/v1/images` that are no images.
const ROUTES: [&str; 2] = ["archive", "prune"];
const MAX_FROM: usize = 1024;
const MAX_PLATFORM: usize = 100;
const MAX_SECRET: usize = 16 << 10;
/// The longest that a request waits for an operation.
const MAX_WAIT: u64 = 60;
/// Pieces of an archive on their way to `forkd-image`.
const PIECES: usize = 4;

/// Whether something of an owner is the actor's, as operations ask.
fn owns(actor: &Actor) -> impl Fn(Option<&str>) -> bool + Send + Sync + 'static {
    let actor = actor.clone();
    move |owner| actor.owns(owner)
}

/// Images that parents can be built from.
#[utoipa::path(get, path = "/v1/images", tag = "images", responses(
    (status = 200, description = "Every image", body = Vec<ImageInfo>)
))]
pub async fn list(State(app): State<Arc<App>>, actor: Actor) -> Answer<Json<Vec<ImageInfo>>> {
    Ok(Json(images::list(&app, owns(&actor)).await?))
}

/// Fetches a container image from a registry.
#[utoipa::path(post, path = "/v1/images", tag = "images", request_body = FetchImage, responses(
    (status = 202, description = "It is being fetched, or was here already", body = OperationInfo)
))]
pub async fn fetch(
    State(app): State<Arc<App>>,
    actor: Actor,
    Body(request): Body<FetchImage>,
) -> Answer<(StatusCode, Json<OperationInfo>)> {
    let wish = wish(request, &actor)?;
    let operation = images::fetch(&app, wish, owns(&actor)).await?;
    Ok((StatusCode::ACCEPTED, Json(operation)))
}

fn wish(request: FetchImage, actor: &Actor) -> Result<FetchWish, Failure> {
    let bad = |message: String| Failure::new(ErrorCode::InvalidRequest, message);
    let from = request.from;
    if from.is_empty() || from.len() > MAX_FROM || !from.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(bad(format!(
            "from has 1 to {MAX_FROM} visible ASCII characters"
        )));
    }
    // `-` is the program's own word for what follows on its input.
    if from.starts_with('-') {
        return Err(bad("from is the name of an image in a registry".into()));
    }
    if request
        .platform
        .as_ref()
        .is_some_and(|text| text.len() > MAX_PLATFORM)
    {
        return Err(bad(format!(
            "platform has at most {MAX_PLATFORM} characters"
        )));
    }
    Ok(FetchWish {
        from,
        name: name(request.name)?,
        platform: request.platform,
        disk_mib: disk(request.disk_mib)?,
        pull: request.pull,
        credential: request.credential.map(credential).transpose()?,
        owner: actor.owner.clone(),
        built: None,
    })
}

fn name(name: Option<String>) -> Result<Option<String>, Failure> {
    if let Some(name) = &name {
        parse_tag(name)?;
        if ROUTES.contains(&name.as_str()) {
            return Err(Failure::new(
                ErrorCode::InvalidName,
                format!("{name} is the name of a route"),
            ));
        }
    }
    Ok(name)
}

fn disk(mib: Option<u32>) -> Result<u32, Failure> {
    let mib = mib.unwrap_or(DISK_MIB);
    if DISK_RANGE.contains(&mib) {
        return Ok(mib);
    }
    let (low, high) = (DISK_RANGE.start(), DISK_RANGE.end());
    Err(Failure::new(
        ErrorCode::InvalidRequest,
        format!("disk_mib is {low} to {high}"),
    ))
}

fn credential(wire: RegistryCredential) -> Result<FetchCredential, Failure> {
    let fits = |text: &str| text.len() <= MAX_SECRET && !text.chars().any(char::is_control);
    let (fits, credential) = match wire {
        RegistryCredential::Password { username, password } => (
            fits(&username) && fits(&password),
            FetchCredential::Password { username, password },
        ),
        RegistryCredential::Identity { token } => {
            (fits(&token), FetchCredential::Identity { token })
        }
        RegistryCredential::Bearer { token } => (fits(&token), FetchCredential::Bearer { token }),
    };
    if fits {
        return Ok(credential);
    }
    Err(Failure::new(
        ErrorCode::InvalidRequest,
        "the credential is too long, or has control characters in it",
    ))
}

/// How an archive becomes an image.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ArchiveParams {
    /// Name of the image here; by default one is made from its digest.
    #[param(
        min_length = 1,
        max_length = 64,
        pattern = "^[A-Za-z0-9_][A-Za-z0-9._-]*$"
    )]
    name: Option<String>,
    /// Platform to choose, such as `linux/amd64`.
    #[param(max_length = 100)]
    platform: Option<String>,
    /// Size of the disk in MiB; only what is used takes space on the host.
    #[param(minimum = 64, maximum = 1048576)]
    disk_mib: Option<u32>,
}

/// Makes an image from an archive: a saved container image, an OCI layout, or a root file system as tar.
#[utoipa::path(post, path = "/v1/images/archive", tag = "images", params(ArchiveParams),
    request_body(content = String, content_type = "application/octet-stream"), responses(
    (status = 202, description = "The archive has arrived, and the image is being made", body = OperationInfo)
))]
pub async fn archive(
    State(app): State<Arc<App>>,
    actor: Actor,
    Params(params): Params<ArchiveParams>,
    mut body: Chunks,
) -> Answer<(StatusCode, Json<OperationInfo>)> {
    let checked = wish(
        FetchImage {
            from: "archive".into(),
            name: params.name,
            platform: params.platform,
            disk_mib: params.disk_mib,
            pull: PullPolicy::Always,
            credential: None,
        },
        &actor,
    )?;
    let wish = FetchWish {
        from: "-".into(),
        ..checked
    };
    let (pieces, receiver) = tokio::sync::mpsc::channel(PIECES);
    let operation = images::receive(&app, wish, receiver)?;
    loop {
        match body.next().await {
            Ok(None) => break,
            // A receiver that is gone has failed: the operation has the reason.
            Ok(Some(piece)) => {
                if pieces.send(piece.to_vec()).await.is_err() {
                    break;
                }
            }
            Err(failure) => {
                // Half an archive makes no image.
                operation.cancelled.cancel();
                return Err(failure);
            }
        }
    }
    drop(pieces);
    Ok((StatusCode::ACCEPTED, Json(operation.info())))
}

/// Everything about one image.
#[utoipa::path(get, path = "/v1/images/{name}", tag = "images",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 200, description = "What is known", body = ImageDetail)
))]
pub async fn get(
    State(app): State<Arc<App>>,
    actor: Actor,
    PathTag(name): PathTag,
) -> Answer<Json<ImageDetail>> {
    let mut detail = images::detail(&app, name, owns(&actor)).await?;
    detail.snapshots.retain(|tag| {
        tag.parse()
            .is_ok_and(|tag| app.owners.access(|owner| actor.owns(owner), &tag) > Access::None)
    });
    Ok(Json(detail))
}

/// Removes an image. Snapshots that were booted from it stay.
#[utoipa::path(delete, path = "/v1/images/{name}", tag = "images",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 204, description = "It is removed")
))]
pub async fn remove(
    State(app): State<Arc<App>>,
    actor: Actor,
    PathTag(name): PathTag,
) -> Answer<StatusCode> {
    images::remove(&app, name, owns(&actor)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Removes fetched images that no snapshot was booted from, and the cache of builds.
#[utoipa::path(post, path = "/v1/images/prune", tag = "images", responses(
    (status = 200, description = "What was removed", body = PrunedImages)
))]
pub async fn prune(State(app): State<Arc<App>>, actor: Actor) -> Answer<Json<PrunedImages>> {
    let steps = forkd_builds::remove_all(&app, owns(&actor)).await?;
    let mut pruned = images::prune(&app, owns(&actor)).await?;
    pruned.bytes += steps;
    Ok(Json(pruned))
}

/// How long to wait.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct WaitParams {
    /// Seconds to wait for the end of the operation before the response.
    #[serde(default)]
    #[param(maximum = 60)]
    wait_secs: u64,
}

fn operation_of(app: &App, actor: &Actor, id: &str) -> Result<Arc<Operation>, Error> {
    let found = app.operations.get(id)?;
    if actor.owns(Some(&found.owner)) {
        return Ok(found);
    }
    let shown: String = id.chars().take(80).collect();
    Err(Error::refused(
        ErrorCode::OperationNotFound,
        format!("there is no operation {shown}"),
    ))
}

/// Operations of the actor, the newest first.
#[utoipa::path(get, path = "/v1/operations", tag = "images", responses(
    (status = 200, description = "Every operation that is remembered", body = Vec<OperationInfo>)
))]
pub async fn operations(
    State(app): State<Arc<App>>,
    actor: Actor,
) -> Answer<Json<Vec<OperationInfo>>> {
    let all = app.operations.list();
    let own = all.iter().filter(|one| actor.owns(Some(&one.owner)));
    Ok(Json(own.map(|one| one.info()).collect()))
}

/// How far an operation has come.
#[utoipa::path(get, path = "/v1/operations/{operation}", tag = "images",
    params(("operation" = String, Path, description = "Its ID"), WaitParams), responses(
    (status = 200, description = "What is known", body = OperationInfo)
))]
pub async fn operation(
    State(app): State<Arc<App>>,
    actor: Actor,
    Path(id): Path<String>,
    Params(params): Params<WaitParams>,
) -> Answer<Json<OperationInfo>> {
    let found = operation_of(&app, &actor, &id)?;
    let longest = Duration::from_secs(params.wait_secs.min(MAX_WAIT));
    Ok(Json(found.wait(longest).await))
}

/// Cancels an operation.
#[utoipa::path(delete, path = "/v1/operations/{operation}", tag = "images",
    params(("operation" = String, Path, description = "Its ID")), responses(
    (status = 204, description = "It ends")
))]
pub async fn cancel(
    State(app): State<Arc<App>>,
    actor: Actor,
    Path(id): Path<String>,
) -> Answer<StatusCode> {
    operation_of(&app, &actor, &id)?.cancelled.cancel();
    Ok(StatusCode::NO_CONTENT)
}
