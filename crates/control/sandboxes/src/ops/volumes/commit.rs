//! Commits: what a sandbox has in a volume becomes the content of that volume.

use std::sync::Arc;

use forkd_api::{ErrorCode, VolumeInfo, VolumeMode};
use forkd_guest_proto::HoldRequest;
use forkd_store::Deletion;
use forkd_types::{SandboxId, Tag};
use tokio::sync::oneshot;

use super::content::is_clean;
use crate::agent_limits;
use crate::app::App;
use crate::error::Error;
use crate::ops::branch::{self, Branch, Branched};
use crate::ops::snapshots;
use crate::sandbox::{Ask, Changes, CutMode, SandboxHandle};
use crate::volumes::Content;

/// Makes what a sandbox has in a volume the content of that volume. The sandbox goes on.
pub async fn commit(app: &Arc<App>, id: &SandboxId, name: &Tag) -> Result<VolumeInfo, Error> {
    app.check_open()?;
    let sandbox = app.sandboxes.get(id)?;
    let record = sandbox.record();
    let used = record.volumes.iter().find(|used| used.name == *name);
    let used = used.cloned().ok_or_else(|| {
        Error::refused(
            ErrorCode::VolumeNotFound,
            format!("sandbox {id} does not use volume {name}"),
        )
    })?;
    // A conflict that is known now costs no cut.
    let volume = app.volumes.get(name, |_| true)?;
    if used.mode == VolumeMode::Clone && volume.generation != used.generation {
        let content = Content {
            base: volume.base,
            layers: volume.layers,
            clean: volume.clean,
            leases: Vec::new(),
        };
        let refused = app
            .volumes
            .commit(&app.store, id, name, used.generation, content);
        return refused.await.map(|volume| volume.info());
    }
    let client = sandbox.agent().await?;
    let hold = |held| HoldRequest {
        path: used.path.clone(),
        held,
    };
    let held = client.by(agent_limits::answer()).hold(hold(true)).await;
    held.map_err(Error::agent(format!(
        "volume {name} could not be written out"
    )))?;
    let cut = cut(app, &sandbox, used.slot).await;
    let freed = client.by(agent_limits::answer()).hold(hold(false)).await;
    let content = cut?;
    freed.map_err(Error::agent(format!(
        "volume {name} cannot be written any more"
    )))?;
    let committed = app
        .volumes
        .commit(&app.store, id, name, used.generation, content);
    let committed = committed.await?;
    let changes = Changes {
        committed: Some((name.clone(), committed.generation)),
        ..Changes::default()
    };
    let (sender, done) = oneshot::channel();
    sandbox.ask(Ask::Update(changes, sender))?;
    done.await.map_err(|_| sandbox.not_running())??;
    Ok(committed.info())
}

/// The disk of a running sandbox at one instant, as durable content: a branch whose name is dropped again.
async fn cut(app: &Arc<App>, sandbox: &SandboxHandle, slot: usize) -> Result<Content, Error> {
    let tag: Tag = format!("volume-{:016x}", rand::random::<u64>())
        .parse()
        .map_err(|_| Error::Task)?;
    let wish = Branch {
        tag: Some(tag.clone()),
        mode: CutMode::Diff,
        wait: true,
        parent: None,
        freeze: false,
    };
    let Branched::Ready(_) = branch::branch(app, &sandbox.id, wish).await? else {
        return Err(Error::Task);
    };
    let manifest = app
        .store
        .manifest(&tag)
        .map_err(Error::store("the cut was not stored"))?;
    let disk = manifest.disks.get(slot).ok_or(Error::Task)?.clone();
    let content = app
        .blocking(move |app| {
            let clean = is_clean(app, &disk.base, &disk.layers)?;
            let held = disk.layers.iter().map(|layer| layer.digest);
            Ok(Content {
                base: disk.base,
                leases: vec![app.store.hold(held)],
                layers: disk.layers,
                clean,
            })
        })
        .await;
    snapshots::delete(app, tag, Deletion::Force).await?;
    content
}
