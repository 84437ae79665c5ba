//! Routes of volumes: disks that outlive the sandboxes that use them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use forkd_api::{CreateVolume, ErrorCode, VolumeInfo, VolumeMount};
use forkd_types::Tag;

use super::owned::OwnedSandbox;
use forkd_edge::auth::Actor;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::{Body, Chunks, PathTag};
use forkd_sandboxes::app::App;
use forkd_sandboxes::ops::branch::parse_tag;
use forkd_sandboxes::ops::volumes::{self, Import};
use forkd_sandboxes::volumes::VolumeWish;

/// Longest path of a mount.
const MAX_PATH: usize = 1024;
/// Bytes of a refused image that are read.
const MAX_DRAINED: usize = 64 << 20;
/// Volumes of one sandbox.
const MAX_VOLUMES: usize = 3;

/// The volumes of a request, checked. A volume of another owner does not exist.
pub fn wishes(
    app: &App,
    actor: &Actor,
    mounts: &[VolumeMount],
) -> Result<Vec<VolumeWish>, Failure> {
    let bad = |message: String| Failure::new(ErrorCode::InvalidRequest, message);
    if mounts.len() > MAX_VOLUMES {
        return Err(bad(format!("a sandbox has at most {MAX_VOLUMES} volumes")));
    }
    let mut wishes = Vec::new();
    for mount in mounts {
        let path = mount.path.trim_end_matches('/');
        let plain = path.starts_with('/')
            && path.len() <= MAX_PATH
            && !path.contains('\0')
            && path
                .split('/')
                .skip(1)
                .all(|part| !matches!(part, "" | "." | ".."));
        if !plain {
            return Err(bad(format!(
                "{:?} is not the path of a volume: an absolute path below the root, without \"..\"",
                mount.path
            )));
        }
        let name = parse_tag(&mount.name)?;
        app.volumes.get(&name, |owner| actor.owns(Some(owner)))?;
        wishes.push(VolumeWish {
            name,
            path: path.to_owned(),
            mode: mount.mode,
        });
    }
    Ok(wishes)
}

/// Volumes of the actor, by name.
#[utoipa::path(get, path = "/v1/volumes", tag = "volumes", responses(
    (status = 200, description = "The volumes", body = Vec<VolumeInfo>)
))]
pub async fn list(State(app): State<Arc<App>>, actor: Actor) -> Answer<Json<Vec<VolumeInfo>>> {
    let found = app.volumes.list(|owner| actor.owns(Some(owner)));
    Ok(Json(found.iter().map(|volume| volume.info()).collect()))
}

/// Creates an empty volume with an ext4 file system.
#[utoipa::path(post, path = "/v1/volumes", tag = "volumes", request_body = CreateVolume, responses(
    (status = 201, description = "The volume is durable", body = VolumeInfo)
))]
pub async fn create(
    State(app): State<Arc<App>>,
    actor: Actor,
    Body(request): Body<CreateVolume>,
) -> Answer<(StatusCode, Json<VolumeInfo>)> {
    let name = parse_tag(&request.name)?;
    let made = volumes::create(&app, name, request.size_mib, actor.owner.clone()).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

/// Creates a volume from an ext4 image, which is the body.
#[utoipa::path(post, path = "/v1/volumes/{name}/image", tag = "volumes",
    params(("name" = String, Path, description = "Its name")),
    request_body(content = String, content_type = "application/octet-stream"), responses(
    (status = 201, description = "The volume is durable", body = VolumeInfo)
))]
pub async fn import(
    State(app): State<Arc<App>>,
    actor: Actor,
    PathTag(name): PathTag,
    mut body: Chunks,
) -> Answer<(StatusCode, Json<VolumeInfo>)> {
    let mut import = match Import::begin(&app, &name) {
        Ok(import) => import,
        Err(error) => {
            // A client that is still sending does not read the refusal.
            drain(&mut body).await?;
            return Err(error.into());
        }
    };
    while let Some(piece) = body.next().await? {
        import.write(&app, piece.to_vec()).await?;
    }
    let made = import.finish(&app, name, actor.owner.clone()).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

/// Reads a small body to its end. A client that sends more sees a broken connection.
async fn drain(body: &mut Chunks) -> Result<(), Failure> {
    let mut left = MAX_DRAINED;
    while let Some(piece) = body.next().await? {
        match left.checked_sub(piece.len()) {
            Some(rest) => left = rest,
            None => break,
        }
    }
    Ok(())
}

/// Describes one volume of the actor.
#[utoipa::path(get, path = "/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 200, description = "The volume", body = VolumeInfo)
))]
pub async fn get(
    State(app): State<Arc<App>>,
    actor: Actor,
    PathTag(name): PathTag,
) -> Answer<Json<VolumeInfo>> {
    let found = app.volumes.get(&name, |owner| actor.owns(Some(owner)))?;
    Ok(Json(found.info()))
}

/// Deletes a volume that no sandbox writes. Clones of it go on.
#[utoipa::path(delete, path = "/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 204, description = "It is gone")
))]
pub async fn delete(
    State(app): State<Arc<App>>,
    actor: Actor,
    PathTag(name): PathTag,
) -> Answer<StatusCode> {
    let owns = |owner: &str| actor.owns(Some(owner));
    app.volumes.remove(&name, owns).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes what a sandbox has in a volume the content of that volume. The sandbox goes on. A clone is refused if the volume has
/// changed since it was cloned.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/volumes/{name}/commit", tag = "volumes",
    params(("id" = String, Path, description = "The sandbox"), ("name" = String, Path, description = "The volume")), responses(
    (status = 200, description = "The volume with its new content", body = VolumeInfo)
))]
pub async fn commit(
    State(app): State<Arc<App>>,
    actor: Actor,
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
) -> Answer<Json<VolumeInfo>> {
    let name: Tag = parse_tag(&path.1)?;
    app.volumes.get(&name, |owner| actor.owns(Some(owner)))?;
    Ok(Json(volumes::commit(&app, &sandbox.id, &name).await?))
}
