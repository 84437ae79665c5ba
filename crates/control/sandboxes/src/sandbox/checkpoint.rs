//! Points a sandbox can go back to.
//!
//! The VMM keeps the content of a checkpoint; the record keeps its name and the disk layers below it. Both end with the
//! sandbox. Going back is [`super::rollback`].

use std::fs::File;
use std::sync::Arc;

use forkd_api::{CheckpointInfo, ErrorCode, RollbackInfo};
use forkd_vmm_proto::{Capability, CheckpointReport, CheckpointSpec, Command, Event, Reply};
use tokio::sync::oneshot;

use super::disk_budget;
use super::headroom;
use super::layers::{announce, new_layers, withdraw};
use super::owner::SandboxOwner;
use super::rollback;
use super::state::Step;
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::launch::{FdList, NewLayer};
use crate::state::{CheckpointRecord, LayerRef, SandboxRecord};

/// A request about checkpoints.
#[derive(Debug)]
pub enum CheckpointAsk {
    Make {
        /// Its name; one is made up if missing.
        name: Option<String>,
        /// Told when it is kept.
        done: oneshot::Sender<Result<CheckpointInfo, Error>>,
    },
    /// Go back to one.
    Rollback {
        /// Its name; the newest if missing.
        to: Option<String>,
        /// Told when the agent answers again.
        done: oneshot::Sender<Result<RollbackInfo, Error>>,
    },
    Drop {
        name: String,
        /// Told when it is forgotten.
        done: oneshot::Sender<Result<(), Error>>,
    },
}

impl CheckpointAsk {
    /// Answers with an error. The caller may have stopped waiting.
    pub(super) fn refuse(self, error: Error) {
        match self {
            Self::Make { done, .. } => drop(done.send(Err(error))),
            Self::Rollback { done, .. } => drop(done.send(Err(error))),
            Self::Drop { done, .. } => drop(done.send(Err(error))),
        }
    }

    fn needs(&self) -> Capability {
        match self {
            Self::Make { .. } | Self::Drop { .. } => Capability::Checkpoint,
            Self::Rollback { .. } => Capability::Rollback,
        }
    }
}

/// Carries a request out.
pub(super) async fn serve(owner: &mut SandboxOwner, ask: CheckpointAsk) {
    let sandbox = Arc::clone(&owner.sandbox);
    if let Err(error) = owner.require(ask.needs()) {
        return ask.refuse(error);
    }
    if !sandbox.step(Step::BeginCut) {
        return ask.refuse(sandbox.not_running());
    }
    // The caller may have stopped waiting.
    match ask {
        CheckpointAsk::Make { name, done } => drop(done.send(make(owner, name).await)),
        CheckpointAsk::Rollback { to, done } => {
            drop(done.send(rollback::rollback(owner, to).await));
        }
        CheckpointAsk::Drop { name, done } => drop(done.send(forget(owner, &name).await)),
    }
    sandbox.step(Step::EndCut);
}

/// As the API shows it.
pub fn info(record: &CheckpointRecord, unchanged: bool) -> CheckpointInfo {
    CheckpointInfo {
        name: record.name.clone(),
        created_at_unix: record.created_at_unix,
        pause_us: record.pause_us,
        bytes: record.bytes,
        unchanged,
    }
}

async fn make(owner: &mut SandboxOwner, name: Option<String>) -> Result<CheckpointInfo, Error> {
    let app = Arc::clone(&owner.app);
    let before = owner.sandbox.record();
    let copied = headroom::private_mib(&before);
    let room = headroom::raise(&app, &before, copied).await?;
    let made = make_within(owner, &before, name).await;
    if let Some(room) = room {
        room.lower(&app, &before).await;
    }
    made
}

async fn make_within(
    owner: &mut SandboxOwner,
    before: &SandboxRecord,
    name: Option<String>,
) -> Result<CheckpointInfo, Error> {
    if let Some(name) = &name
        && before.checkpoints.iter().any(|c| c.name == *name)
    {
        return Err(Error::refused(
            ErrorCode::AlreadyExists,
            format!("sandbox {} has a checkpoint {name} already", before.id),
        ));
    }
    let (memory, layers) = open_files(owner, before).await?;
    let record = announce(owner, &layers, |_| {}).await?;
    let report = match keep(owner, &memory, &layers).await {
        Ok(report) => report,
        Err((error, captured)) => {
            // After the instant the VMM may use any of the layers, and has not said which: they stay in the record.
            if error.is_vmm_refusal() && !captured {
                withdraw(owner, names(&layers), |_| {}).await?;
            }
            return Err(error);
        }
    };
    metrics::histogram!("forkd_checkpoint_pause_seconds").record(report.pause_us as f64 / 1e6);
    let made = CheckpointRecord {
        name: name.unwrap_or_else(|| free_name(&record, report.id)),
        id: report.id,
        created_at_unix: clock::unix(),
        pause_us: report.pause_us,
        bytes: report.pages_written * forkd_types::PAGE_SIZE,
        disks: disks_below(before, &record, &layers, &report),
        volumes: record.volumes.clone(),
    };
    let answer = info(&made, report.unchanged);
    let unused = layers
        .iter()
        .enumerate()
        .filter(|(at, _)| report.layers_taken.get(*at) != Some(&true))
        .map(|(_, layer)| layer.name.clone())
        .collect();
    withdraw(owner, unused, |record| record.checkpoints.push(made)).await?;
    Ok(answer)
}

/// Opens everything before the sandbox is stopped. The memory file has no name: only the VMM uses it.
async fn open_files(
    owner: &SandboxOwner,
    record: &SandboxRecord,
) -> Result<(File, Vec<NewLayer>), Error> {
    let record = record.clone();
    owner
        .app
        .blocking(move |app| {
            check_budget(app, &record)?;
            let path = app.dirs.vm(&record.id).join("checkpoint.memory");
            // A daemon that died here leaves the name.
            let _ = std::fs::remove_file(&path);
            let memory = File::options()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path)
                .map_err(Error::io("create", &path))?;
            std::fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            Ok((memory, new_layers(app, &record)?))
        })
        .await
}

fn check_budget(app: &App, record: &SandboxRecord) -> Result<(), Error> {
    let limit = app.config.disk_limit_bytes;
    let used = disk_budget::measure(app, record);
    if disk_budget::allows_checkpoint(limit, &used) {
        return Ok(());
    }
    Err(Error::hinted(
        ErrorCode::LimitReached,
        format!(
            "sandbox {} uses {} of the {limit} bytes that its disks and checkpoints may take",
            record.id,
            used.own()
        ),
        "delete a checkpoint, or start the daemon with a higher --disk-limit-mib",
    ))
}

/// Has the VMM keep the checkpoint. An error comes with whether the instant was past.
async fn keep(
    owner: &mut SandboxOwner,
    memory: &File,
    layers: &[NewLayer],
) -> Result<CheckpointReport, (Error, bool)> {
    let mut fds = FdList::default();
    let spec = CheckpointSpec {
        memory: fds.push(memory),
        new_layers: layers.iter().map(|layer| fds.push(&layer.file)).collect(),
    };
    let fds = fds.finish().map_err(|error| (error.into(), false))?;
    let mut captured = false;
    let reply = owner
        .call_noting(Command::Checkpoint(spec), &fds, |event| {
            captured |= matches!(event, Event::CutTaken { .. });
        })
        .await
        .and_then(|reply| reply.map_err(Error::vmm("the checkpoint could not be kept")));
    match reply {
        Ok(Reply::Checkpoint(report)) => Ok(report),
        Ok(_) => Err((Error::Task, captured)),
        Err(error) => Err((error, captured)),
    }
}

async fn forget(owner: &mut SandboxOwner, name: &str) -> Result<(), Error> {
    let record = owner.sandbox.record();
    let gone = find(&record, Some(name))?.clone();
    let same = record.checkpoints.iter().filter(|c| c.id == gone.id);
    if same.count() == 1 {
        let command = Command::DropCheckpoint { id: gone.id };
        owner.call(command, &[]).await?;
    }
    let record = owner
        .save(|record| record.checkpoints.retain(|c| c.name != name))
        .await?;
    sweep(owner, &record).await
}

/// Removes the files of layers that nothing refers to; the VMM has those it needs open.
pub(super) async fn sweep(owner: &SandboxOwner, record: &SandboxRecord) -> Result<(), Error> {
    let used = record.own_layers();
    let dir = owner.app.dirs.vm(&record.id);
    owner
        .app
        .blocking(move |_| {
            let entries = std::fs::read_dir(&dir).map_err(Error::io("read", &dir))?;
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.ends_with(".layer")
                    && !used.contains(&name)
                    && let Err(error) = std::fs::remove_file(entry.path())
                {
                    tracing::warn!(path = %entry.path().display(), %error, "not removed");
                }
            }
            Ok(())
        })
        .await
}

pub(super) fn names(layers: &[NewLayer]) -> Vec<String> {
    layers.iter().map(|layer| layer.name.clone()).collect()
}

/// The layers of each disk below the checkpoint. A disk whose new layer was not needed keeps its top layer above it.
fn disks_below(
    before: &SandboxRecord,
    record: &SandboxRecord,
    layers: &[NewLayer],
    report: &CheckpointReport,
) -> Vec<Vec<LayerRef>> {
    let known = record.checkpoints.iter().find(|c| c.id == report.id);
    if let Some(known) = known.filter(|_| report.unchanged) {
        return known.disks.clone();
    }
    let mut disks: Vec<Vec<LayerRef>> = before.disks.iter().map(|d| d.layers.clone()).collect();
    for (layer, taken) in layers.iter().zip(&report.layers_taken) {
        if !taken && let Some(disk) = disks.get_mut(layer.slot) {
            disk.pop();
        }
    }
    disks
}

fn free_name(record: &SandboxRecord, id: u64) -> String {
    let taken = |name: &String| record.checkpoints.iter().any(|c| c.name == *name);
    (id..)
        .map(|number| format!("cp-{number}"))
        .find(|name| !taken(name))
        .unwrap_or_default()
}

/// A checkpoint by its name; the newest if none is given.
pub(super) fn find<'a>(
    record: &'a SandboxRecord,
    name: Option<&str>,
) -> Result<&'a CheckpointRecord, Error> {
    let found = match name {
        Some(name) => record.checkpoints.iter().find(|c| c.name == name),
        None => record.checkpoints.last(),
    };
    found.ok_or_else(|| {
        Error::hinted(
            ErrorCode::CheckpointNotFound,
            match name {
                Some(name) => format!("sandbox {} has no checkpoint {name}", record.id),
                None => format!("sandbox {} has no checkpoint", record.id),
            },
            "GET /v1/sandboxes/{id}/checkpoints (forkd checkpoint ID --list) lists them",
        )
    })
}
