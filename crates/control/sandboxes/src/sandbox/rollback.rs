//! Going back to a checkpoint, in place.
//!
//! The intent is durable before the VMM hears of it. A daemon that dies in between does the roll-back again at its next
//! start, which leads to the same state.

use std::sync::Arc;
use std::time::Instant;

use forkd_api::{EventKind, RollbackInfo};
use forkd_vmm_proto::{Command, Reply, RollbackReport, RollbackSpec};

use super::checkpoint::{find, names, sweep};
use super::handle::SandboxHandle;
use super::identity;
use super::layers::{announce, new_layers, withdraw};
use super::owner::SandboxOwner;
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::launch::{FdList, NewLayer};
use crate::ops::volumes;
use crate::state::CheckpointRecord;

/// Goes back and waits until the agent answers again.
pub(super) async fn rollback(
    owner: &mut SandboxOwner,
    to: Option<String>,
) -> Result<RollbackInfo, Error> {
    let started = Instant::now();
    let record = owner.sandbox.record();
    let target = find(&record, to.as_deref())?.clone();
    let mut below = record;
    // Layers written since the checkpoint go, and do not count against the limit.
    for (disk, layers) in below.disks.iter_mut().zip(&target.disks) {
        disk.layers.clone_from(layers);
    }
    let layers = owner
        .app
        .blocking(move |app| new_layers(app, &below))
        .await?;
    let intent = target.name.clone();
    announce(owner, &layers, |record| record.rolling_back = Some(intent)).await?;
    let report = match go_back(owner, target.id, &layers).await {
        Ok(report) => report,
        Err(error) => {
            withdraw(owner, names(&layers), |record| record.rolling_back = None).await?;
            return Err(error);
        }
    };
    owner.sandbox.end_era();
    metrics::histogram!("forkd_rollback_pause_seconds").record(report.pause_us as f64 / 1e6);
    owner.reset_network().await;
    settle(owner, &target, &layers).await?;
    greet_again(&owner.app, &owner.sandbox).await?;
    owner.app.events.tell(
        EventKind::SandboxRolledBack,
        &owner.sandbox.id,
        Some(target.name.clone()),
    );
    Ok(RollbackInfo {
        to: target.name,
        pause_us: report.pause_us,
        pages: report.pages,
        ready_us: clock::micros(started.elapsed()),
    })
}

async fn go_back(
    owner: &mut SandboxOwner,
    to: u64,
    layers: &[NewLayer],
) -> Result<RollbackReport, Error> {
    let mut fds = FdList::default();
    let spec = RollbackSpec {
        to,
        new_layers: layers.iter().map(|layer| fds.push(&layer.file)).collect(),
        generation: rand::random(),
    };
    let fds = fds.finish()?;
    match owner.call(Command::Rollback(spec), &fds).await? {
        Reply::Rollback(report) => Ok(report),
        _ => Err(Error::Task),
    }
}

/// The disks are those of the checkpoint, with new layers on top.
async fn settle(
    owner: &SandboxOwner,
    target: &CheckpointRecord,
    layers: &[NewLayer],
) -> Result<(), Error> {
    let record = owner
        .save(|record| {
            for (disk, below) in record.disks.iter_mut().zip(&target.disks) {
                disk.layers.clone_from(below);
            }
            record.add_layers(layers.iter().map(|layer| (layer.slot, &layer.name)));
            record.rolling_back = None;
            record.volumes.clone_from(&target.volumes);
        })
        .await?;
    sweep(owner, &record).await
}

/// Connects to the agent of a guest that went back, which has forgotten its connections. The guest decides whether it
/// answers and this is the owner's task, so the wait is bounded and ends with a deletion.
async fn greet_again(app: &App, sandbox: &Arc<SandboxHandle>) -> Result<(), Error> {
    sandbox.keep_agent(None).await;
    let limit = app.config.ready_timeout;
    let greeting = async {
        let client = identity::renew(sandbox, limit).await?;
        volumes::let_go(&client, &sandbox.record()).await;
        sandbox.keep_agent(Some(client)).await;
        Ok(())
    };
    tokio::select! {
        () = sandbox.stop.cancelled() => Err(Error::Gone {
            id: sandbox.id.clone(),
            how: "it was deleted".into(),
        }),
        done = tokio::time::timeout(limit, greeting) => done.unwrap_or_else(|_| {
            Err(Error::Timeout {
                what: format!("the agent of {}", sandbox.id),
                seconds: limit.as_secs(),
            })
        }),
    }
}
