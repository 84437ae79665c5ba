//! Routes that create, list, suspend, resume and delete workspaces.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use forkd_api::{CreateWorkspace, SuspendRequest, WorkspaceInfo};

use super::owned::{OwnedWorkspace, check_visible};
use forkd_edge::auth::Actor;
use forkd_edge::errors::Answer;
use forkd_edge::extract::Body;
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::branch::parse_tag;
use forkd_sandboxes::ops::workspaces::{self, NewWorkspace};
use forkd_sandboxes::trace;

/// Lists the workspaces of the owner.
#[utoipa::path(get, path = "/v1/workspaces", tag = "workspaces", responses(
    (status = 200, description = "Every workspace", body = Vec<WorkspaceInfo>)
))]
pub async fn list(State(app): State<Arc<App>>, actor: Actor) -> Answer<Json<Vec<WorkspaceInfo>>> {
    let mut all = workspaces::list(&app).await?;
    all.retain(|info| actor.owns(Some(&info.owner)));
    Ok(Json(all))
}

/// Makes a workspace and starts it.
#[utoipa::path(post, path = "/v1/workspaces", tag = "workspaces", request_body = CreateWorkspace, responses(
    (status = 201, description = "It runs", body = WorkspaceInfo)
))]
pub async fn create(
    State(app): State<Arc<App>>,
    actor: Actor,
    Body(request): Body<CreateWorkspace>,
) -> Answer<(StatusCode, Json<WorkspaceInfo>)> {
    let wish = NewWorkspace {
        name: parse_tag(&request.name)?,
        tag: parse_tag(&request.snapshot_tag)?,
        owner: actor.owner.clone(),
        per_child_netns: request.per_child_netns,
        memory_limit_mib: request.memory_limit_mib,
        network: request
            .network
            .as_ref()
            .map(forkd_api::NetworkRequest::checked)
            .transpose()
            .map_err(Error::from)?,
    };
    check_visible(&app, &actor, &wish.tag)?;
    let work = trace::spawn(async move { workspaces::make(&app, wish).await });
    let info = work.await.map_err(|_| Error::Task)??;
    Ok((StatusCode::CREATED, Json(info)))
}

/// Describes one workspace.
#[utoipa::path(get, path = "/v1/workspaces/{name}", tag = "workspaces",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 200, description = "The workspace", body = WorkspaceInfo)
))]
pub async fn get(
    State(app): State<Arc<App>>,
    OwnedWorkspace(name): OwnedWorkspace,
) -> Answer<Json<WorkspaceInfo>> {
    Ok(Json(workspaces::get(&app, &name).await?))
}

/// Ends a workspace and forgets its state.
#[utoipa::path(delete, path = "/v1/workspaces/{name}", tag = "workspaces",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 204, description = "It is gone")
))]
pub async fn delete(
    State(app): State<Arc<App>>,
    OwnedWorkspace(name): OwnedWorkspace,
) -> Answer<StatusCode> {
    let work = trace::spawn(async move { workspaces::delete(&app, &name).await });
    work.await.map_err(|_| Error::Task)??;
    Ok(StatusCode::NO_CONTENT)
}

/// Writes a workspace's state down and gives its memory back.
#[utoipa::path(post, path = "/v1/workspaces/{name}/suspend", tag = "workspaces", request_body = SuspendRequest,
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 200, description = "It sleeps", body = WorkspaceInfo)
))]
pub async fn suspend(
    State(app): State<Arc<App>>,
    OwnedWorkspace(name): OwnedWorkspace,
    Body(request): Body<SuspendRequest>,
) -> Answer<Json<WorkspaceInfo>> {
    let work = trace::spawn(async move { workspaces::suspend(&app, &name, request.diff).await });
    Ok(Json(work.await.map_err(|_| Error::Task)??))
}

/// Starts a workspace again from its state.
#[utoipa::path(post, path = "/v1/workspaces/{name}/resume", tag = "workspaces",
    params(("name" = String, Path, description = "Its name")), responses(
    (status = 200, description = "It runs", body = WorkspaceInfo)
))]
pub async fn resume(
    State(app): State<Arc<App>>,
    OwnedWorkspace(name): OwnedWorkspace,
) -> Answer<Json<WorkspaceInfo>> {
    let work = trace::spawn(async move { workspaces::resume(&app, &name).await });
    Ok(Json(work.await.map_err(|_| Error::Task)??))
}
