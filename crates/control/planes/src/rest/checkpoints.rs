//! Routes that make, list and drop checkpoints, and roll back to one.
//!
//! Each request goes into the queue of the sandbox's owner and is carried out even if the client disconnects.

use axum::Json;
use axum::extract::Path;
use axum::http::StatusCode;
use forkd_api::{CheckpointInfo, CheckpointRequest, RollbackInfo, RollbackRequest};
use tokio::sync::oneshot;

use super::owned::OwnedSandbox;
use forkd_edge::errors::Answer;
use forkd_edge::extract::Body;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::branch::parse_tag;
use forkd_sandboxes::sandbox::{Ask, CheckpointAsk, SandboxHandle, checkpoint_info};

/// The checkpoints of a sandbox, the oldest first.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/checkpoints", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The checkpoints", body = Vec<CheckpointInfo>)
))]
pub async fn list(OwnedSandbox(sandbox): OwnedSandbox) -> Answer<Json<Vec<CheckpointInfo>>> {
    let record = sandbox.record();
    let infos = record.checkpoints.iter().map(|c| checkpoint_info(c, false));
    Ok(Json(infos.collect()))
}

/// Keeps a sandbox's state to go back to. Costs what has changed since the last one; if that is nothing,
/// the answer is that one.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/checkpoints", tag = "sandboxes", request_body = CheckpointRequest,
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 201, description = "The checkpoint", body = CheckpointInfo)
))]
pub async fn create(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<CheckpointRequest>,
) -> Answer<(StatusCode, Json<CheckpointInfo>)> {
    let name = request.name.map(|name| checked(&name)).transpose()?;
    let made = asked(&sandbox, |done| CheckpointAsk::Make { name, done }).await?;
    Ok((StatusCode::CREATED, Json(made)))
}

/// Forgets a checkpoint.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/checkpoints/{name}", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id"),
        ("name" = String, Path, description = "The checkpoint")), responses(
    (status = 204, description = "It is gone")
))]
pub async fn remove(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
) -> Answer<StatusCode> {
    let name = checked(&path.1)?;
    asked(&sandbox, |done| CheckpointAsk::Drop { name, done }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Goes back to a checkpoint. The sandbox keeps its id; answers when its agent answers again.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/rollback", tag = "sandboxes", request_body = RollbackRequest,
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "It is back", body = RollbackInfo)
))]
pub async fn rollback(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<RollbackRequest>,
) -> Answer<Json<RollbackInfo>> {
    let to = request.to.map(|name| checked(&name)).transpose()?;
    let done = asked(&sandbox, |done| CheckpointAsk::Rollback { to, done }).await?;
    Ok(Json(done))
}

/// A name has the form of a tag.
fn checked(name: &str) -> Result<String, Error> {
    parse_tag(name).map(|tag| tag.to_string())
}

/// Puts a request into the sandbox's queue; it is carried out even if the client goes away.
async fn asked<T>(
    sandbox: &SandboxHandle,
    ask: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> CheckpointAsk,
) -> Result<T, Error> {
    sandbox
        .answer(|reply| Ask::Checkpoint(Box::new(ask(reply))))
        .await
}
