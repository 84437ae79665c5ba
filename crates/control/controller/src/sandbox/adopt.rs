//! Finding the sandboxes of an earlier daemon again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::ErrorCode;
use forkd_types::SandboxId;
use forkd_vmm_link::Vmm;
use forkd_vmm_proto::{Command, PROTOCOL_VERSION, Reply, VmmPhase};

use super::checkpoint::CheckpointAsk;
use super::driver::{Ask, Owned, drive, until_removed};
use super::entry::Sandbox;
use super::state::{Phase, Step};
use crate::app::App;
use crate::db::{SandboxRecord, StoredState};
use crate::error::Error;
use crate::launch::StartedVm;

/// How long a VMM may take to say what it is doing.
const STATUS: Duration = Duration::from_secs(10);

/// What became of the sandboxes of an earlier daemon.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Adopted {
    /// They go on.
    pub adopted: usize,
    /// Their VM is gone.
    pub vanished: usize,
    /// VMs that nobody was told of; they were ended.
    pub ended: usize,
}

/// Takes over every sandbox that was acknowledged and still lives, marks those that do not, and ends
/// every VM that nobody was told of.
pub async fn adopt(app: &Arc<App>) -> Result<Adopted, Error> {
    let mut counts = Adopted::default();
    let records = app.db.sandboxes().await?;
    let mut taken: HashMap<SandboxId, StartedVm> = app
        .launcher
        .adopt()
        .await?
        .into_iter()
        .map(|taken| (taken.vm.id.clone(), taken))
        .collect();
    let epoch = next_epoch(app).await?;
    for record in records {
        let id = record.id.clone();
        let vm = taken.remove(&id);
        match (record.state, vm) {
            (StoredState::Launching | StoredState::Stopping, vm) => {
                if vm.is_some() {
                    app.launcher.kill(&id).await?;
                    counts.ended += 1;
                }
                app.db.delete_sandboxes(vec![id]).await?;
            }
            (StoredState::Failed, vm) => {
                if vm.is_some() {
                    app.launcher.kill(&id).await?;
                }
                failed(app, record, None);
            }
            (StoredState::Running | StoredState::Paused, Some(vm)) => {
                match take_over(app, record.clone(), vm, epoch).await {
                    Ok(()) => counts.adopted += 1,
                    Err(error) => {
                        tracing::warn!(sandbox = %id, error = error.chain(), "not adopted");
                        app.launcher.kill(&id).await?;
                        failed(app, record, Some("its VMM did not answer after a restart"));
                        counts.vanished += 1;
                    }
                }
            }
            (StoredState::Running | StoredState::Paused, None) => {
                failed(app, record, Some("its VM was gone after a restart"));
                counts.vanished += 1;
            }
        }
    }
    for id in taken.keys() {
        app.launcher.kill(id).await?;
        counts.ended += 1;
    }
    sweep(app).await?;
    Ok(counts)
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

async fn take_over(
    app: &Arc<App>,
    record: SandboxRecord,
    taken: StartedVm,
    epoch: u32,
) -> Result<(), Error> {
    let (vmm, events) = Vmm::new(taken.control, epoch, taken.vm.capabilities)
        .map_err(Error::io("use", "the control socket of a VMM"))?;
    let hello = Command::Hello {
        version: PROTOCOL_VERSION,
    };
    let asking = async {
        vmm.call(hello, &[]).await?;
        vmm.call(Command::Status, &[]).await
    };
    let reply = tokio::time::timeout(STATUS, asking)
        .await
        .map_err(|_| Error::Timeout {
            what: "the VMM's answer".into(),
            seconds: STATUS.as_secs(),
        })?
        .map_err(Error::vmm("the VMM did not say what it is doing"))?;
    let phase = match reply {
        Reply::Status(status) if status.phase == VmmPhase::Running => Phase::Running,
        Reply::Status(status) if status.phase == VmmPhase::Paused => {
            if record.state == StoredState::Paused {
                Phase::Paused
            } else {
                // The daemon died in the middle of a cut.
                vmm.run(Command::Resume, &[])
                    .await
                    .map_err(Error::vmm("the VM could not be resumed"))?;
                Phase::Running
            }
        }
        _ => return Err(Error::Task),
    };
    let mut record = record;
    // Whether the last cut of the earlier daemon succeeded is not known, so the next builds on the start.
    record.built = None;
    let lease = app.store.hold(record.blobs());
    let id = record.id.clone();
    let unfinished = record.rolling_back.clone();
    let (sandbox, queue) = Sandbox::new(record, phase, app.dirs.vsock(&id), app.dirs.console(&id));
    let sandbox = Arc::new(sandbox);
    // A limit that was lowered meanwhile does not end what lives.
    let _ = app
        .sandboxes
        .insert_all(&[Arc::clone(&sandbox)], usize::MAX);
    tracing::info!(sandbox = %id, pid = taken.vm.pid, "adopted");
    if unfinished.is_some() {
        let (done, _) = tokio::sync::oneshot::channel();
        let again = CheckpointAsk::Rollback {
            to: unfinished,
            done,
        };
        sandbox.ask(Ask::Checkpoint(Box::new(again)))?;
    }
    let owned = Owned {
        app: Arc::clone(app),
        sandbox,
        vmm,
        events,
        lease,
    };
    tokio::spawn(drive(owned, queue));
    Ok(())
}

/// Enters a sandbox that is gone, so that people see what became of it.
fn failed(app: &Arc<App>, mut record: SandboxRecord, how: Option<&str>) {
    if let Some(how) = how {
        record.failure = Some(how.to_owned());
    }
    record.state = StoredState::Failed;
    let how = record.failure.clone().unwrap_or_default();
    let id = record.id.clone();
    let (sandbox, _) = Sandbox::new(
        record.clone(),
        Phase::Failed,
        app.dirs.vsock(&id),
        app.dirs.console(&id),
    );
    sandbox.set_error(ErrorCode::SandboxGone, how);
    let sandbox = Arc::new(sandbox);
    let _ = app
        .sandboxes
        .insert_all(&[Arc::clone(&sandbox)], usize::MAX);
    let app = Arc::clone(app);
    tokio::spawn(async move {
        app.write_down(record).await;
        until_removed(&sandbox).await;
        sandbox.step(Step::Stop);
        let nothing = app.store.hold([]);
        app.forget(&sandbox, nothing).await;
    });
}

/// Removes files that belong to no sandbox, and content that nobody needs.
async fn sweep(app: &Arc<App>) -> Result<(), Error> {
    app.blocking(|app| {
        for id in app.dirs.list()? {
            if app.sandboxes.get(&id).is_err() {
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
