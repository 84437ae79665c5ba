//! Sandboxes and snapshots of the caller. To others they do not exist.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use forkd_edge::auth::Actor;
use forkd_sandboxes::app::App;
use forkd_sandboxes::ops::pause;
use forkd_sandboxes::owners::Access;
use forkd_sandboxes::sandbox::{Phase, SandboxHandle};
use forkd_sandboxes::state::WorkspaceRecord;
use forkd_types::{SandboxId, Tag};

use crate::e2b::error::Refusal;
use crate::e2b::route::parse_id;
use crate::e2b::state::E2b;

/// A sandbox of the caller, live or paused, by the ID in the path.
#[derive(Debug)]
pub enum Owned {
    Live(Arc<SandboxHandle>),
    Paused(Box<WorkspaceRecord>, SandboxId),
}

impl Owned {
    pub fn id(&self) -> &SandboxId {
        match self {
            Self::Live(sandbox) => &sandbox.id,
            Self::Paused(_, id) => id,
        }
    }

    /// The sandbox, if it has a VM.
    pub fn live(self) -> Result<Arc<SandboxHandle>, Refusal> {
        match self {
            Self::Live(sandbox) => Ok(sandbox),
            Self::Paused(_, id) => Err(Refusal::new(
                axum::http::StatusCode::CONFLICT,
                format!("sandbox {id} is paused"),
            )),
        }
    }

    /// Finds a sandbox of the caller.
    pub async fn find(app: &Arc<App>, actor: &Actor, text: &str) -> Result<Self, Refusal> {
        let missing = || Refusal::no_sandbox(text);
        let id = parse_id(text).ok_or_else(missing)?;
        let live = app.sandboxes.get(&id).ok();
        // A sandbox that failed or is being ended exists no more for the SDKs.
        let live = live.filter(|found| !matches!(found.phase(), Phase::Failed | Phase::Stopping));
        if let Some(sandbox) = live {
            if !actor.owns(Some(&sandbox.owner())) {
                return Err(missing());
            }
            return Ok(Self::Live(sandbox));
        }
        let paused = pause::find(app, &id).await?.ok_or_else(missing)?;
        if !actor.owns(Some(&paused.owner)) {
            return Err(missing());
        }
        Ok(Self::Paused(Box::new(paused), id))
    }
}

impl FromRequestParts<Arc<E2b>> for Owned {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, e2b: &Arc<E2b>) -> Result<Self, Refusal> {
        let actor = caller(parts, e2b).await?;
        let Path(text) = Path::<String>::from_request_parts(parts, e2b)
            .await
            .map_err(|_| Refusal::bad("the path is not UTF-8"))?;
        Self::find(&e2b.app, &actor, &text).await
    }
}

/// Who makes the request.
#[derive(Debug)]
pub struct Caller(pub Actor);

async fn caller(parts: &mut Parts, e2b: &Arc<E2b>) -> Result<Actor, Refusal> {
    Ok(Actor::from_request_parts(parts, e2b).await?)
}

impl FromRequestParts<Arc<E2b>> for Caller {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, e2b: &Arc<E2b>) -> Result<Self, Refusal> {
        Ok(Self(caller(parts, e2b).await?))
    }
}

/// How far the caller gets with a snapshot.
pub fn access(app: &App, actor: &Actor, tag: &Tag) -> Access {
    app.owners.access(|owner| actor.owns(owner), tag)
}
