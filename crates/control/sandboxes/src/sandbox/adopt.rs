//! Adoption: a new daemon takes over the sandboxes of an earlier one.
//!
//! [`adopt`] compares the stored records with the VMs that `forkd-spawn` still has. A sandbox that was acknowledged and
//! has a VM goes on; one without a VM is marked as failed. A VM without an acknowledged sandbox is ended.

use std::collections::HashMap;
use std::sync::Arc;

use forkd_types::SandboxId;

use super::birth::{Adoption, Birth};
use super::handle::SandboxHandle;
use super::owner;
use super::state::Phase;
use crate::app::App;
use crate::error::Error;
use crate::launch::StartedVm;
use crate::ops::volumes::{self, Run};
use crate::state::{SandboxRecord, StoredState};

/// How many sandboxes of an earlier daemon were found, by result.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Adopted {
    /// They go on.
    pub adopted: usize,
    /// Their VM is gone.
    pub vanished: usize,
    /// VMs that no acknowledged sandbox needs; they were ended.
    pub ended: usize,
}

/// Takes over every sandbox that was acknowledged and still lives, marks those that do not, and ends every VM that was
/// never acknowledged. Answers when each has answered.
pub async fn adopt(app: &Arc<App>) -> Result<Adopted, Error> {
    let mut counts = Adopted::default();
    let stored = app.db.sandboxes().await?;
    let mut taken: HashMap<SandboxId, StartedVm> = app
        .launcher
        .adopt()
        .await?
        .into_iter()
        .map(|taken| (taken.vm.id.clone(), taken))
        .collect();
    for (name, file) in app.launcher.kept().await? {
        app.store.adopt_volatile(name, file.into());
    }
    let epoch = next_epoch(app).await?;
    for bad in stored.unreadable {
        tracing::error!(sandbox = %bad.id, problem = bad.problem, "a stored record cannot be read");
        counts.vanished += 1;
        end_left(app, taken.remove(&bad.id), &mut counts).await?;
        enter(
            app,
            SandboxRecord::unreadable(bad.id),
            Birth::Lost(bad.problem),
        );
    }
    let (mut adopted, mut lost, mut unfinished) = (Vec::new(), Vec::new(), Vec::new());
    for record in stored.readable {
        let vm = taken.remove(&record.id);
        match (record.state, vm) {
            (StoredState::Launching | StoredState::Stopping, vm) => {
                end_left(app, vm, &mut counts).await?;
                let run = match record.state {
                    StoredState::Stopping => Run::Over,
                    _ => Run::Never,
                };
                if volumes::take_back(app, &record, run).await {
                    app.db.delete_sandboxes(vec![record.id]).await?;
                } else {
                    app.volumes.keep(app.store.hold(record.blobs()));
                    unfinished.push(record.id);
                }
            }
            (StoredState::Failed, vm) => {
                end_left(app, vm, &mut counts).await?;
                let how = record.failure.clone().unwrap_or_default();
                lost.push(enter(app, record, Birth::Lost(how)));
            }
            (StoredState::Running | StoredState::Paused, Some(taken)) => {
                let birth = Birth::Adopt(Adoption { taken, epoch });
                adopted.push(enter(app, record, birth));
            }
            (StoredState::Running | StoredState::Paused, None) => {
                counts.vanished += 1;
                let how = "its VM was gone after a restart".to_owned();
                lost.push(enter(app, record, Birth::Lost(how)));
            }
        }
    }
    for left in taken.into_values() {
        end_left(app, Some(left), &mut counts).await?;
    }
    for sandbox in adopted {
        sandbox.launched().await;
        match sandbox.phase() {
            Phase::Failed => counts.vanished += 1,
            _ => counts.adopted += 1,
        }
    }
    // What they wrote to volumes is content of the volumes before unused content goes.
    for sandbox in lost {
        sandbox.launched().await;
    }
    let used = app.sandboxes.list();
    let used = used.iter().filter_map(|sandbox| sandbox.record().netns);
    app.namespaces.keep_only(&used.collect()).await;
    volumes::free_orphans(app, &unfinished).await;
    sweep(app, &unfinished).await?;
    app.drop_volatile().await?;
    Ok(counts)
}

/// Gives a stored sandbox its owner.
fn enter(app: &Arc<App>, record: SandboxRecord, birth: Birth) -> Arc<SandboxHandle> {
    let slot = app.limits.adopted(&record.owner);
    owner::start(app, record, slot, birth)
}

/// Ends a VM that no acknowledged sandbox has.
async fn end_left(app: &App, left: Option<StartedVm>, counts: &mut Adopted) -> Result<(), Error> {
    if let Some(left) = left {
        app.launcher.kill(&left.vm.id).await?;
        counts.ended += 1;
    }
    Ok(())
}

/// Numbers the owners of control sockets, so that an answer to an earlier one is not taken for ours.
async fn next_epoch(app: &Arc<App>) -> Result<u32, Error> {
    Ok(app
        .db
        .run(|c| {
            c.execute(
                "INSERT INTO meta (key, value) VALUES ('epoch', '2')
                 ON CONFLICT (key) DO UPDATE SET value = CAST(value AS INTEGER) + 1",
                [],
            )?;
            Ok(c.query_row(
                "SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'epoch'",
                [],
                |row| row.get(0),
            )?)
        })
        .await?)
}

/// Removes files that belong to no sandbox, and content without a reference. Files with the only copy of what was written
/// to a volume stay.
async fn sweep(app: &Arc<App>, kept: &[SandboxId]) -> Result<(), Error> {
    let kept = kept.to_vec();
    app.blocking(move |app| {
        for id in app.dirs.list()? {
            if app.sandboxes.get(&id).is_err() && !kept.contains(&id) {
                tracing::info!(sandbox = %id, "files of no sandbox removed");
                app.dirs.remove(&id);
            }
        }
        app.store
            .collect()
            .map(drop)
            .map_err(Error::store("unused content could not be removed"))
    })
    .await
}
