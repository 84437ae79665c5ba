//! Cutting a running sandbox.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use forkd_api::{EventKind, SnapshotInfo};
use forkd_store::{
    BlobRef, DiskManifest, Ingested, Manifest, MemoryManifest, Origin, Published, SCHEMA, Staging,
    Versions,
};
use forkd_types::Tag;
use forkd_vmm_proto::{Command, CutReport, CutSpec, Event, Reply, StopCause};
use tokio::sync::oneshot;

use super::checkpoint::{NewLayer, new_layers};
use super::driver::{Ended, Owned};
use super::entry::Sandbox;
use super::freeze::FrozenSource;
use super::layers;
use super::state::Step;
use crate::app::App;
use crate::clock;
use crate::db::{BuiltRecord, DiskStack, LayerRef, SandboxRecord};
use crate::error::Error;
use crate::launch::FdList;
use crate::snapshots::is_hidden;
use crate::writing::Claimed;

/// Layers of memory after which a cut writes all of it: every layer is a descriptor and a mapping.
const MAX_MEMORY_LAYERS: usize = 32;

/// How much a cut writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutMode {
    /// All of memory.
    Full,
    /// What differs from the last cut, or from the snapshot the sandbox was started from.
    Diff,
}

/// A request to cut a sandbox.
#[derive(Debug)]
pub struct BranchAsk {
    /// The tag to make. What a hidden one would name is only there for those who start from it at once.
    pub claimed: Claimed,
    /// How much to write.
    pub mode: CutMode,
    /// Freeze the user processes of the guest for the cut.
    pub freeze: bool,
    /// Told as soon as the source runs again, for a caller who does not wait for the end: why a cut fails after that is
    /// kept with the tag.
    pub taken: Option<oneshot::Sender<u64>>,
    /// The source stands still from the instant on, and goes on when the cut fails or the other end is dropped.
    pub held: Option<oneshot::Receiver<()>>,
    /// Told when the snapshot is durable, or there, if it has no name.
    pub done: oneshot::Sender<Result<BranchDone, Error>>,
}

/// What a cut made.
#[derive(Debug)]
pub struct BranchDone {
    /// The snapshot, with a lease on its blobs.
    pub published: Published,
    /// As the API shows it.
    pub info: SnapshotInfo,
}

/// Carries a branch out. An error is the end of the VM.
pub async fn serve(owned: &mut Owned, ask: BranchAsk) -> Result<(), Option<StopCause>> {
    let sandbox = Arc::clone(&owned.sandbox);
    if !sandbox.step(Step::BeginCut) {
        let _ = ask.done.send(Err(sandbox.not_running()));
        return Ok(());
    }
    let BranchAsk {
        claimed,
        mode,
        freeze,
        taken,
        held,
        done,
    } = ask;
    let mut cut = Cut {
        owned,
        claimed: &claimed,
        mode,
        freeze,
        taken,
        told: false,
        goes_on: held.is_none(),
        layers_moved: false,
        ended: None,
    };
    let result = cut.run().await;
    let told = cut.told;
    let mut ended = cut.ended.take();
    let held = held.filter(|_| result.is_ok());
    if held.is_none() {
        sandbox.step(Step::EndCut);
    }
    let tag = claimed.tag().clone();
    // First: whoever hears of the tag may use or delete it at once.
    let_go(claimed, told, result.as_ref().err());
    let shown = (!is_hidden(&tag)).then_some(&tag);
    announce(&owned.app, &sandbox, shown, result.as_ref().err());
    // The caller may have stopped waiting.
    let _ = done.send(result);
    if let Some(held) = held {
        hold(owned, &mut ended, held).await;
        sandbox.step(Step::EndCut);
    }
    match ended {
        Some(cause) => Err(cause),
        None => Ok(()),
    }
}

/// Frees the tag. A caller who was told that it is being written finds the reason there if it failed.
fn let_go(claimed: Claimed, told: bool, error: Option<&Error>) {
    match error {
        Some(error) if told => claimed.failed(error.chain()),
        _ => drop(claimed),
    }
}

fn announce(app: &App, sandbox: &Sandbox, tag: Option<&Tag>, error: Option<&Error>) {
    let Some(error) = error else {
        let detail = tag.map(Tag::to_string);
        app.events
            .tell(EventKind::SandboxBranched, &sandbox.id, detail);
        if let Some(tag) = tag {
            app.events.tell(EventKind::SnapshotReady, tag, None);
        }
        return;
    };
    metrics::counter!("forkd_branch_failures_total").increment(1);
    tracing::warn!(sandbox = %sandbox.id, ?tag, error = error.chain(), "branch failed");
    if let Some(tag) = tag {
        app.events
            .tell(EventKind::SnapshotFailed, tag, Some(error.chain()));
    }
}

/// Keeps the source still until nobody wants that any more, or it is ended.
async fn hold(owned: &mut Owned, ended: &mut Option<Ended>, held: oneshot::Receiver<()>) {
    tokio::select! {
        biased;
        () = owned.sandbox.stop.cancelled() => {}
        _ = held => go_on(owned, ended).await,
    }
}

/// Lets a source go on that stood still for a cut.
async fn go_on(owned: &mut Owned, ended: &mut Option<Ended>) {
    if let Err(error) = owned.call(ended, Command::Resume, &[]).await {
        tracing::error!(sandbox = %owned.sandbox.id, error = error.chain(), "it does not go on after a cut");
    }
}

/// A cut under way.
struct Cut<'a> {
    owned: &'a mut Owned,
    claimed: &'a Claimed,
    mode: CutMode,
    freeze: bool,
    taken: Option<oneshot::Sender<u64>>,
    /// Somebody was told that the tag is being written.
    told: bool,
    /// The source runs on from the instant.
    goes_on: bool,
    /// The instant is past: whatever comes of the cut, the new layers are in use.
    layers_moved: bool,
    /// The VM ended meanwhile.
    ended: Option<Ended>,
}

/// The files a cut is written to.
struct Files {
    staging: Staging,
    state: File,
    memory: File,
    index: Option<File>,
    /// Slot, name and file of each new layer.
    layers: Vec<NewLayer>,
}

impl Cut<'_> {
    async fn run(&mut self) -> Result<BranchDone, Error> {
        let started = Instant::now();
        let record = self.owned.sandbox.record();
        if record.builds_on().0.layers.len() >= MAX_MEMORY_LAYERS {
            self.mode = CutMode::Full;
        }
        // First of all: a process that cannot be frozen leaves nothing to undo.
        let frozen = match self.freeze {
            true => {
                let sandbox = &self.owned.sandbox;
                Some(FrozenSource::freeze(sandbox.agent().await?, &sandbox.id).await?)
            }
            false => None,
        };
        let files = self.prepare(&record).await?;
        let before = record.clone();
        let record = self.announce_layers(&files).await?;
        let report = match self.cut(&files, record.builds_on().1, frozen).await {
            Ok(report) => report,
            Err(error) => {
                self.take_back(&before, &error, &files).await;
                return Err(error);
            }
        };
        metrics::histogram!("forkd_branch_pause_seconds").record(report.pause_us as f64 / 1e6);
        let info = self.publish(record, files, &report, started).await;
        if info.is_err() {
            if !self.goes_on {
                go_on(self.owned, &mut self.ended).await;
            }
            // The VMM builds on a cut that nobody has; the next one is from the start.
            let record = self.owned.sandbox.update(|record| record.built = None);
            self.owned.app.db.put_sandboxes(vec![record]).await?;
        }
        metrics::histogram!("forkd_branch_seconds").record(started.elapsed().as_secs_f64());
        info
    }

    /// Opens everything before the source is stopped for the first time.
    async fn prepare(&self, record: &SandboxRecord) -> Result<Files, Error> {
        let app = Arc::clone(&self.owned.app);
        let record = record.clone();
        let index = self.mode == CutMode::Diff;
        app.blocking(move |app| {
            let staging = app
                .store
                .stage()
                .map_err(Error::store("no place to write the cut"))?;
            let create = |name: &str| {
                staging
                    .create(name)
                    .map_err(Error::store("no place to write the cut"))
            };
            let state = create("state")?;
            let memory = create("memory")?;
            let index = index.then(|| create("index")).transpose()?;
            let layers = new_layers(app, &record)?;
            Ok(Files {
                staging,
                state,
                memory,
                index,
                layers,
            })
        })
        .await
    }

    /// Writes the new layers down before the VMM hears of them: if the daemon dies now, an empty layer too
    /// many in the record is harmless, one too few would lose data.
    async fn announce_layers(&self, files: &Files) -> Result<SandboxRecord, Error> {
        let layers = files.layers.iter().map(|(slot, name, _)| (*slot, name));
        let record = self
            .owned
            .sandbox
            .update(|record| record.add_layers(layers));
        self.owned
            .app
            .db
            .put_sandboxes(vec![record.clone()])
            .await?;
        Ok(record)
    }

    /// Stops the VM for the instant of the cut and waits until everything is written.
    async fn cut(
        &mut self,
        files: &Files,
        onto: u64,
        mut frozen: Option<FrozenSource>,
    ) -> Result<CutReport, Error> {
        let mut fds = FdList::default();
        let spec = CutSpec {
            state: fds.push(&files.state),
            memory: fds.push(&files.memory),
            only_changed: self.mode == CutMode::Diff,
            onto,
            index: files.index.as_ref().map(|file| fds.push(file)),
            new_layers: files
                .layers
                .iter()
                .map(|(_, _, file)| fds.push(file))
                .collect(),
            resume: self.goes_on,
        };
        let fds = fds.finish()?;
        let Self {
            owned,
            ended,
            layers_moved,
            claimed,
            taken,
            told,
            ..
        } = self;
        let reply = owned
            .call_noting(ended, Command::Cut(spec), &fds, |event| {
                if let Event::CutTaken { pause_us, .. } = event {
                    // The source runs again, and its processes with it.
                    drop(frozen.take());
                    *layers_moved = true;
                    claimed.taken(pause_us);
                    if let Some(taken) = taken.take() {
                        *told = taken.send(pause_us).is_ok();
                    }
                }
            })
            .await?;
        match reply.map_err(Error::vmm("the sandbox could not be cut"))? {
            Reply::Cut(report) => Ok(report),
            _ => Err(Error::Task),
        }
    }

    /// If the VMM refused before the instant, the VM is as it was: the new layers are not in use.
    async fn take_back(&self, before: &SandboxRecord, error: &Error, files: &Files) {
        let refused = matches!(
            error,
            Error::Vmm {
                source: forkd_vmm_link::VmmCallError::Refused(_),
                ..
            }
        );
        if !refused || self.layers_moved {
            return;
        }
        let disks = before.disks.clone();
        let record = self.owned.sandbox.update(|record| record.disks = disks);
        let app = &self.owned.app;
        if !app.write_down(record).await {
            return;
        }
        for (_, name, _) in &files.layers {
            let path = app.dirs.vm(&self.owned.sandbox.id).join(name);
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "not removed");
            }
        }
    }

    /// Turns what was written into content, writes down that the frozen layers are content now, and
    /// makes the tag visible.
    async fn publish(
        &mut self,
        record: SandboxRecord,
        files: Files,
        report: &CutReport,
        started: Instant,
    ) -> Result<BranchDone, Error> {
        let app = Arc::clone(&self.owned.app);
        let new: Vec<String> = files.layers.iter().map(|layer| layer.1.clone()).collect();
        let ingested = {
            let record = record.clone();
            app.blocking(move |app| ingest(app, &record, files, &new))
                .await?
        };
        self.settle(&record, &ingested).await?;
        layers::shorten(self.owned, &mut self.ended).await?;
        let record = self.owned.sandbox.record();
        let manifest = self.manifest(&record, &ingested, report, started);
        let path = app.store.layout().blob(&ingested.memory.blob.digest);
        let built = BuiltRecord {
            image: report.image,
            memory: manifest.memory.clone(),
        };
        let published = app
            .blocking(move |app| {
                let published = if is_hidden(&manifest.tag) {
                    app.store.unnamed(manifest)
                } else {
                    app.store.publish(manifest)
                };
                published.map_err(Error::store("the snapshot could not be stored"))
            })
            .await?;
        let record = self.owned.sandbox.update(|record| {
            record.branch_count += 1;
            record.built = Some(built);
            record.last_branch_memory_path = Some(path.display().to_string());
        });
        self.owned.lease = app.store.hold(record.blobs());
        app.db.put_sandboxes(vec![record]).await?;
        let mut info = crate::snapshots::info(&app, &published.manifest);
        if self.mode == CutMode::Diff {
            info.diff_ms = Some(report.total_us.saturating_sub(report.pause_us) / 1000);
            info.diff_physical_bytes = Some(report.pages_written * forkd_types::PAGE_SIZE);
            info.diff_logical_bytes = Some(u64::from(published.manifest.memory_mib) << 20);
        }
        Ok(BranchDone { published, info })
    }

    /// Replaces files of the sandbox by content in its record, and then removes their old names.
    async fn settle(&mut self, record: &SandboxRecord, ingested: &Written) -> Result<(), Error> {
        let mut frozen: Vec<(String, BlobRef)> = Vec::new();
        for (name, layer) in &ingested.layers {
            frozen.push((name.clone(), layer.blob));
        }
        let updated = self.owned.sandbox.update(|stored| {
            for (name, blob) in &frozen {
                stored.layer_is_content(name, *blob);
            }
        });
        let app = Arc::clone(&self.owned.app);
        self.owned.lease = app.store.hold(updated.blobs());
        app.db.put_sandboxes(vec![updated]).await?;
        let dir = app.dirs.vm(&record.id);
        for (name, _) in &frozen {
            // The content has its own name now; the VMM has it open in any case.
            if let Err(error) = std::fs::remove_file(dir.join(name)) {
                tracing::warn!(sandbox = %record.id, name, %error, "not removed");
            }
        }
        Ok(())
    }

    fn manifest(
        &self,
        record: &SandboxRecord,
        written: &Written,
        report: &CutReport,
        started: Instant,
    ) -> Manifest {
        let memory = match &written.index {
            Some(index) => {
                let mut layers = record.builds_on().0.layers.clone();
                layers.push(written.memory.blob);
                MemoryManifest {
                    layers,
                    index: Some(index.blob),
                }
            }
            None => MemoryManifest {
                layers: vec![written.memory.blob],
                index: None,
            },
        };
        Manifest {
            schema: SCHEMA,
            tag: self.claimed.tag().clone(),
            created_at_unix: clock::unix(),
            memory_mib: record.memory_mib,
            vcpus: record.vcpus,
            cpu: record.cpu,
            state: written.state.blob,
            memory,
            disks: record.disks.iter().map(frozen_disk).collect(),
            network: record.network,
            source: record.source.clone(),
            parent: (self.mode == CutMode::Diff).then(|| record.as_parent()),
            origin: Origin::Branch {
                sandbox: record.id.to_string(),
                pause_us: report.pause_us,
                total_us: clock::micros(started.elapsed()),
                pages: report.pages_written,
            },
            versions: Versions {
                forkd: env!("CARGO_PKG_VERSION").to_owned(),
                vmm: env!("CARGO_PKG_VERSION").to_owned(),
                agent: record.agent.clone(),
                numpy: record.numpy.clone(),
            },
            labels: BTreeMap::new(),
        }
    }
}

/// What a cut left, as content.
struct Written {
    state: Ingested,
    memory: Ingested,
    index: Option<Ingested>,
    /// Frozen layers that were files of the sandbox, by name.
    layers: Vec<(String, Ingested)>,
}

fn ingest(
    app: &App,
    record: &SandboxRecord,
    files: Files,
    new: &[String],
) -> Result<Written, Error> {
    let store = |name: &str| {
        app.store
            .ingest(&files.staging.file(name))
            .map_err(Error::store("the cut could not be stored"))
    };
    let state = store("state")?;
    let memory = store("memory")?;
    let index = files.index.as_ref().map(|_| store("index")).transpose()?;
    let dir = app.dirs.vm(&record.id);
    let mut layers = Vec::new();
    for layer in record.disks.iter().flat_map(|disk| &disk.layers) {
        if let LayerRef::Own(name) = layer
            && !new.contains(name)
        {
            let content = app
                .store
                .ingest(&dir.join(name))
                .map_err(Error::store("a disk layer could not be stored"))?;
            layers.push((name.clone(), content));
        }
    }
    Ok(Written {
        state,
        memory,
        index,
        layers,
    })
}

/// The disk without the layers that came into use with the cut: all others are content by now.
fn frozen_disk(disk: &DiskStack) -> DiskManifest {
    DiskManifest {
        base: disk.base,
        layers: disk.frozen(),
        read_only: disk.read_only,
        serial: disk.serial.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writing::WritingTags;

    #[test]
    fn a_failure_is_kept_only_for_a_caller_who_is_gone() {
        let tags = WritingTags::default();
        let tag: Tag = "t".parse().unwrap();
        let claim = || tags.claim(&tag, None).unwrap();
        let_go(claim(), false, Some(&Error::Task));
        assert!(tags.list().is_empty());
        let_go(claim(), true, None);
        assert!(tags.list().is_empty());
        let_go(claim(), true, Some(&Error::Task));
        assert_eq!(tags.list()[0].1.failure, Some(Error::Task.chain()));
    }
}
