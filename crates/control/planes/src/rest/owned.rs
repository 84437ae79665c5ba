//! The one place where ownership is enforced: extractors that yield an object only to those who may have it.
//!
//! A handler that takes one of these cannot reach the object of another owner; to others such an object does not exist, so
//! the refusal is the same 404 as for a name that does not exist. The gate has checked the role before.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use forkd_api::ErrorCode;
use forkd_types::Tag;

use forkd_edge::auth::Actor;
use forkd_edge::errors::Failure;
use forkd_edge::extract::{PathId, PathTag};
use forkd_sandboxes::app::App;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::workspaces;
use forkd_sandboxes::owners::Access;
use forkd_sandboxes::sandbox::SandboxHandle;

/// A sandbox of the actor, by the id in the path.
#[derive(Debug)]
pub struct OwnedSandbox(pub Arc<SandboxHandle>);

impl FromRequestParts<Arc<App>> for OwnedSandbox {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Failure> {
        let actor = Actor::from_request_parts(parts, app).await?;
        let PathId(id) = PathId::from_request_parts(parts, app).await?;
        let sandbox = app.sandboxes.get(&id)?;
        if !actor.owns(Some(&sandbox.owner())) {
            return Err(Error::NoSandbox { id }.into());
        }
        Ok(Self(sandbox))
    }
}

/// The tag of a snapshot that the actor may change and delete, from the path.
#[derive(Debug)]
pub struct OwnedSnapshot(pub Tag);

impl FromRequestParts<Arc<App>> for OwnedSnapshot {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Failure> {
        let actor = Actor::from_request_parts(parts, app).await?;
        let PathTag(tag) = PathTag::from_request_parts(parts, app).await?;
        match app.owners.access(|owner| actor.owns(owner), &tag) {
            Access::Own => Ok(Self(tag)),
            Access::Use => Err(Failure::new(
                ErrorCode::Forbidden,
                format!("snapshot {tag} is public, but not yours to change"),
            )),
            Access::None => Err(no_snapshot(&tag).into()),
        }
    }
}

/// The tag of a snapshot that the actor may see and start children from, from the path.
#[derive(Debug)]
pub struct VisibleSnapshot(pub Tag);

impl FromRequestParts<Arc<App>> for VisibleSnapshot {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Failure> {
        let actor = Actor::from_request_parts(parts, app).await?;
        let PathTag(tag) = PathTag::from_request_parts(parts, app).await?;
        check_visible(app, &actor, &tag)?;
        Ok(Self(tag))
    }
}

/// Refuses a tag in a body that the actor may not start children from.
pub fn check_visible(app: &App, actor: &Actor, tag: &Tag) -> Result<(), Error> {
    match app.owners.access(|owner| actor.owns(owner), tag) {
        Access::None => Err(no_snapshot(tag)),
        Access::Use | Access::Own => Ok(()),
    }
}

fn no_snapshot(tag: &Tag) -> Error {
    Error::hinted(
        ErrorCode::SnapshotNotFound,
        format!("there is no snapshot {tag}"),
        "GET /v1/snapshots (forkd images) lists what there is",
    )
}

/// The name of a workspace of the actor, from the path.
#[derive(Debug)]
pub struct OwnedWorkspace(pub Tag);

impl FromRequestParts<Arc<App>> for OwnedWorkspace {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, Failure> {
        let actor = Actor::from_request_parts(parts, app).await?;
        let PathTag(name) = PathTag::from_request_parts(parts, app).await?;
        let owner = workspaces::owner(app, &name).await?;
        if !actor.owns(Some(&owner)) {
            return Err(workspaces::not_found(&name).into());
        }
        Ok(Self(name))
    }
}
