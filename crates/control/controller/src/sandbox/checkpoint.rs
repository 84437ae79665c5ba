//! Points a sandbox can go back to, and going back.
//!
//! The VMM keeps what a checkpoint holds; here is its name and which disk layers lie below it. All of it
//! ends with the sandbox.

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use forkd_api::{CheckpointInfo, ErrorCode, EventKind, RollbackInfo};
use forkd_vmm_link::VmmCallError;
use forkd_vmm_proto::{
    Capability, CheckpointReport, CheckpointSpec, Command, Event, Reply, RollbackReport,
    RollbackSpec,
};
use tokio::sync::oneshot;

use super::driver::{Ended, Owned};
use super::entry::Sandbox;
use super::identity;
use super::state::Step;
use crate::app::App;
use crate::clock;
use crate::db::{CheckpointRecord, LayerRef, SandboxRecord};
use crate::error::Error;
use crate::launch::{FdList, NewDisk};

/// What can be asked about checkpoints.
#[derive(Debug)]
pub enum CheckpointAsk {
    /// Make one.
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
    /// Forget one.
    Drop {
        /// Its name.
        name: String,
        /// Told when it is forgotten.
        done: oneshot::Sender<Result<(), Error>>,
    },
}

impl CheckpointAsk {
    /// Answers with an error. Nobody may be waiting.
    pub(super) fn refuse(self, error: Error) {
        match self {
            Self::Make { done, .. } => drop(done.send(Err(error))),
            Self::Rollback { done, .. } => drop(done.send(Err(error))),
            Self::Drop { done, .. } => drop(done.send(Err(error))),
        }
    }
}

/// Carries a request out. An error is the end of the VM.
pub async fn serve(owned: &mut Owned, ask: CheckpointAsk) -> Result<(), Ended> {
    let sandbox = Arc::clone(&owned.sandbox);
    let needed = match ask {
        CheckpointAsk::Make { .. } | CheckpointAsk::Drop { .. } => Capability::Checkpoint,
        CheckpointAsk::Rollback { .. } => Capability::Rollback,
    };
    if let Err(error) = owned.require(needed) {
        ask.refuse(error);
        return Ok(());
    }
    let begun = sandbox.step(Step::BeginCut);
    let refused = (!begun).then(|| sandbox.not_running());
    let mut work = Work { owned, ended: None };
    match ask {
        CheckpointAsk::Make { name, done } => {
            let result = match refused {
                Some(error) => Err(error),
                None => work.make(name).await,
            };
            let _ = done.send(result);
        }
        CheckpointAsk::Rollback { to, done } => {
            let result = match refused {
                Some(error) => Err(error),
                None => work.rollback(to).await,
            };
            let _ = done.send(result);
        }
        CheckpointAsk::Drop { name, done } => {
            let result = match refused {
                Some(error) => Err(error),
                None => work.forget(&name).await,
            };
            let _ = done.send(result);
        }
    }
    let ended = work.ended.take();
    if begun {
        sandbox.step(Step::EndCut);
    }
    ended.map_or(Ok(()), Err)
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

struct Work<'a> {
    owned: &'a mut Owned,
    ended: Option<Ended>,
}

/// Slot, name and file of a new layer.
pub(super) type NewLayer = (usize, String, File);

impl Work<'_> {
    async fn make(&mut self, name: Option<String>) -> Result<CheckpointInfo, Error> {
        let record = self.owned.sandbox.record();
        if let Some(name) = &name
            && record.checkpoints.iter().any(|c| c.name == *name)
        {
            return Err(Error::refused(
                ErrorCode::AlreadyExists,
                format!("sandbox {} has a checkpoint {name} already", record.id),
            ));
        }
        let (memory, layers) = self.files(&record).await?;
        let before = record;
        let frozen: Vec<Vec<LayerRef>> = before.disks.iter().map(|d| d.layers.clone()).collect();
        let record = self.announce(&layers).await?;
        let report = match self.ask_checkpoint(&memory, &layers).await {
            Ok(report) => report,
            Err((error, taken)) => {
                // Layers that came into use stay in the record: which of them did, the VMM has not said, and one too
                // many is harmless.
                if refused(&error) && !taken {
                    let unused = vec![false; layers.len()];
                    self.take_back(&layers, &unused, None).await?;
                }
                return Err(error);
            }
        };
        let name = name.unwrap_or_else(|| free_name(&record, report.id));
        let known = record.checkpoints.iter().find(|c| c.id == report.id);
        let disks = match known {
            Some(known) if report.unchanged => known.disks.clone(),
            _ => below(&frozen, &layers, &report.layers_taken),
        };
        let made = CheckpointRecord {
            name,
            id: report.id,
            created_at_unix: clock::unix(),
            pause_us: report.pause_us,
            bytes: report.pages_written * forkd_types::PAGE_SIZE,
            disks,
        };
        metrics::histogram!("forkd_checkpoint_pause_seconds").record(report.pause_us as f64 / 1e6);
        let answer = info(&made, report.unchanged);
        self.take_back(&layers, &report.layers_taken, Some(made))
            .await?;
        Ok(answer)
    }

    /// Opens everything before the sandbox is stopped. The memory has no name: it is the VMM's alone.
    async fn files(&self, record: &SandboxRecord) -> Result<(File, Vec<NewLayer>), Error> {
        let record = record.clone();
        self.owned
            .app
            .blocking(move |app| {
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

    /// Writes the new layers down before the VMM hears of them: an empty one too many is harmless, one too
    /// few would lose data.
    async fn announce(&self, layers: &[NewLayer]) -> Result<SandboxRecord, Error> {
        let record = self
            .owned
            .sandbox
            .update(|record| record.add_layers(layers.iter().map(|(slot, name, _)| (*slot, name))));
        self.owned
            .app
            .db
            .put_sandboxes(vec![record.clone()])
            .await?;
        Ok(record)
    }

    /// Takes the layers out of the record that did not come into use, and notes the checkpoint.
    async fn take_back(
        &self,
        layers: &[NewLayer],
        taken: &[bool],
        made: Option<CheckpointRecord>,
    ) -> Result<(), Error> {
        let unused: Vec<&String> = layers
            .iter()
            .enumerate()
            .filter(|(at, _)| taken.get(*at) != Some(&true))
            .map(|(_, (_, name, _))| name)
            .collect();
        let record = self.owned.sandbox.update(|record| {
            for disk in &mut record.disks {
                disk.layers.retain(
                    |layer| !matches!(layer, LayerRef::Own(name) if unused.contains(&name)),
                );
            }
            record.checkpoints.extend(made);
        });
        self.owned.app.db.put_sandboxes(vec![record]).await?;
        let dir = self.owned.app.dirs.vm(&self.owned.sandbox.id);
        for name in unused {
            if let Err(error) = std::fs::remove_file(dir.join(name)) {
                tracing::warn!(sandbox = %self.owned.sandbox.id, name, %error, "not removed");
            }
        }
        Ok(())
    }

    /// An error comes with whether the instant was past.
    async fn ask_checkpoint(
        &mut self,
        memory: &File,
        layers: &[NewLayer],
    ) -> Result<CheckpointReport, (Error, bool)> {
        let mut fds = FdList::default();
        let spec = CheckpointSpec {
            memory: fds.push(memory),
            new_layers: layers.iter().map(|(_, _, file)| fds.push(file)).collect(),
        };
        let fds = fds.finish().map_err(|error| (error.into(), false))?;
        let mut taken = false;
        let reply = self
            .owned
            .call_noting(&mut self.ended, Command::Checkpoint(spec), &fds, |event| {
                taken |= matches!(event, Event::CutTaken { .. });
            })
            .await
            .and_then(|reply| reply.map_err(Error::vmm("the checkpoint could not be kept")));
        match reply {
            Ok(Reply::Checkpoint(report)) => Ok(report),
            Ok(_) => Err((Error::Task, taken)),
            Err(error) => Err((error, taken)),
        }
    }

    async fn rollback(&mut self, to: Option<String>) -> Result<RollbackInfo, Error> {
        let started = Instant::now();
        let record = self.owned.sandbox.record();
        let target = find(&record, to.as_deref())?.clone();
        let layers = {
            let record = record.clone();
            self.owned
                .app
                .blocking(move |app| new_layers(app, &record))
                .await?
        };
        // If the daemon dies now, its successor does it again: that leads to the same state.
        let intent = target.name.clone();
        let record = self.owned.sandbox.update(|record| {
            record.add_layers(layers.iter().map(|(slot, name, _)| (*slot, name)));
            record.rolling_back = Some(intent);
        });
        self.owned.app.db.put_sandboxes(vec![record]).await?;
        let report = match self.ask_rollback(target.id, &layers).await {
            Ok(report) => report,
            Err(error) => {
                self.owned
                    .sandbox
                    .update(|record| record.rolling_back = None);
                let unused = vec![false; layers.len()];
                self.take_back(&layers, &unused, None).await?;
                return Err(error);
            }
        };
        metrics::histogram!("forkd_rollback_pause_seconds").record(report.pause_us as f64 / 1e6);
        self.settle(&target, &layers).await?;
        let sandbox = Arc::clone(&self.owned.sandbox);
        let app = Arc::clone(&self.owned.app);
        greet_again(&app, &sandbox).await?;
        app.events.tell(
            EventKind::SandboxRolledBack,
            &sandbox.id,
            Some(target.name.clone()),
        );
        Ok(RollbackInfo {
            to: target.name,
            pause_us: report.pause_us,
            pages: report.pages,
            ready_us: clock::micros(started.elapsed()),
        })
    }

    async fn ask_rollback(
        &mut self,
        to: u64,
        layers: &[NewLayer],
    ) -> Result<RollbackReport, Error> {
        let mut fds = FdList::default();
        let spec = RollbackSpec {
            to,
            new_layers: layers.iter().map(|(_, _, file)| fds.push(file)).collect(),
            generation: rand::random(),
        };
        let fds = fds.finish()?;
        match self
            .owned
            .call(&mut self.ended, Command::Rollback(spec), &fds)
            .await?
        {
            Reply::Rollback(report) => Ok(report),
            _ => Err(Error::Task),
        }
    }

    /// The disks are those of the checkpoint, with new layers on top.
    async fn settle(&self, target: &CheckpointRecord, layers: &[NewLayer]) -> Result<(), Error> {
        let record = self.owned.sandbox.update(|record| {
            for (disk, below) in record.disks.iter_mut().zip(&target.disks) {
                disk.layers.clone_from(below);
            }
            record.add_layers(layers.iter().map(|(slot, name, _)| (*slot, name)));
            record.rolling_back = None;
        });
        self.owned
            .app
            .db
            .put_sandboxes(vec![record.clone()])
            .await?;
        self.sweep(&record).await
    }

    async fn forget(&mut self, name: &str) -> Result<(), Error> {
        let record = self.owned.sandbox.record();
        let gone = find(&record, Some(name))?.clone();
        let last_name = record
            .checkpoints
            .iter()
            .filter(|c| c.id == gone.id)
            .count()
            == 1;
        if last_name {
            self.owned
                .call(
                    &mut self.ended,
                    Command::DropCheckpoint { id: gone.id },
                    &[],
                )
                .await?;
        }
        let record = self
            .owned
            .sandbox
            .update(|record| record.checkpoints.retain(|c| c.name != name));
        self.owned
            .app
            .db
            .put_sandboxes(vec![record.clone()])
            .await?;
        self.sweep(&record).await
    }

    /// Removes the names of layers that nothing refers to; the VMM has those it needs open.
    async fn sweep(&self, record: &SandboxRecord) -> Result<(), Error> {
        let used = record.own_layers();
        let dir = self.owned.app.dirs.vm(&record.id);
        self.owned
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
}

/// Connects to the agent of a guest that went back, which has forgotten who was connected. The guest decides whether it
/// answers; this is the owner's task, so it waits neither for ever nor for a sandbox that is being deleted.
async fn greet_again(app: &App, sandbox: &Sandbox) -> Result<(), Error> {
    sandbox.keep_agent(None).await;
    let limit = app.config.ready_timeout;
    let greeting = async {
        let client = sandbox
            .connect(limit)
            .await
            .map_err(|error| sandbox.unreachable(&error))?;
        identity::renew(&client, &sandbox.id).await?;
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

/// The VMM said no.
fn refused(error: &Error) -> bool {
    matches!(
        error,
        Error::Vmm {
            source: VmmCallError::Refused(_),
            ..
        }
    )
}

/// New, empty layers for the writable disks.
pub(super) fn new_layers(app: &App, record: &SandboxRecord) -> Result<Vec<NewLayer>, Error> {
    let mut layers = Vec::new();
    for (slot, disk) in record
        .disks
        .iter()
        .enumerate()
        .filter(|(_, d)| !d.read_only)
    {
        let new = NewDisk {
            slot,
            size: disk.base.bytes,
        };
        let (name, file) = app.dirs.new_layer(
            &record.id,
            new,
            record.layer_number(disk),
            app.config.disk_limit_bytes,
        )?;
        layers.push((slot, name, file));
    }
    Ok(layers)
}

/// What lies below the layer that is written: a disk whose new layer was not needed keeps its top.
fn below(frozen: &[Vec<LayerRef>], layers: &[NewLayer], taken: &[bool]) -> Vec<Vec<LayerRef>> {
    let mut disks = frozen.to_vec();
    for ((slot, _, _), taken) in layers.iter().zip(taken) {
        if !taken && let Some(disk) = disks.get_mut(*slot) {
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
fn find<'a>(record: &'a SandboxRecord, name: Option<&str>) -> Result<&'a CheckpointRecord, Error> {
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
