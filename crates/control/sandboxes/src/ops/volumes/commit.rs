//! Commits: what a sandbox has in a volume becomes the content of that volume.

use std::sync::Arc;

use forkd_api::{ErrorCode, VolumeInfo};
use forkd_types::{SandboxId, Tag};

use super::{content, hold};
use crate::app::App;
use crate::error::Error;
use crate::ops::branch;
use crate::sandbox::{Changes, CutMode, Destination, SandboxHandle};
use crate::state::VolumeUse;
use crate::trace;
use crate::volumes::Content;

/// Makes what a sandbox has in a volume the content of that volume. The sandbox goes on.
pub async fn commit(app: &Arc<App>, id: &SandboxId, name: &Tag) -> Result<VolumeInfo, Error> {
    app.check_open()?;
    let sandbox = app.sandboxes.get(id)?;
    let record = sandbox.record();
    let used = record.volumes.into_iter().find(|used| used.name == *name);
    let used = used.ok_or_else(|| {
        Error::hinted(
            ErrorCode::VolumeNotFound,
            format!("sandbox {id} does not use volume {name}"),
            "GET /v1/sandboxes/{id} (forkd ls --json) shows the volumes of a sandbox",
        )
    })?;
    // A task of its own: a client that hangs up must not leave the writes of the guest held.
    let app = Arc::clone(app);
    let work = trace::spawn(async move { commit_used(&app, &sandbox, used).await });
    work.await.map_err(|_| Error::Task)?
}

async fn commit_used(
    app: &Arc<App>,
    sandbox: &SandboxHandle,
    used: VolumeUse,
) -> Result<VolumeInfo, Error> {
    // A conflict that is known now costs no cut.
    app.volumes.committable(&sandbox.id, &used)?;
    app.limits.store_room(&app.store)?;
    let content = clean_content(app, sandbox, &used).await?;
    let committed = app
        .volumes
        .commit(&app.store, &sandbox.id, &used, content)
        .await?;
    let changes = Changes {
        committed: Some((used.name, committed.generation)),
        ..Changes::default()
    };
    sandbox.change(changes).await?;
    Ok(committed.info())
}

/// The disk of a running sandbox at an instant at which its file system is clean, as durable content.
async fn clean_content(
    app: &Arc<App>,
    sandbox: &SandboxHandle,
    used: &VolumeUse,
) -> Result<Content, Error> {
    let slot = app.cut_slot().await?;
    let client = sandbox.agent().await?;
    let name = &used.name;
    hold(&client, used, true)
        .await
        .map_err(Error::agent(format!(
            "volume {name} could not be written out"
        )))?;
    // A live cut syncs nothing and leaves no name behind. Only the disk of the volume becomes durable.
    let cut = branch::cut(sandbox, Destination::Live, CutMode::Diff, false).await;
    let freed = hold(&client, used, false).await;
    drop(slot);
    let made = cut?;
    freed.map_err(Error::agent(format!(
        "volume {name} cannot be written any more"
    )))?;
    let manifest = &made.published.manifest;
    let disk = manifest.disks.get(used.slot).ok_or(Error::Task)?.clone();
    let content = app.blocking(move |app| content::of_cut(app, &disk)).await?;
    // Only now: the lease of the cut keeps the layers until they are durable.
    drop(made);
    Ok(content)
}
