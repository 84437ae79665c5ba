//! Starting children of a snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_api::{ErrorCode, EventKind, SandboxInfo};
use forkd_store::{Lease, Manifest, Published};
use forkd_types::{SandboxId, Tag};
use forkd_vmm_link::{SpawnerError, Taken, Vmm, VmmEvents};
use futures::future::join_all;
use tokio::sync::{Semaphore, mpsc};

use super::disk_budget::{self, DiskUse};
use super::driver::{Ask, Owned, drive};
use super::entry::Sandbox;
use super::identity;
use super::state::{Phase, Step};
use crate::app::App;
use crate::db::{DiskStack, LayerRef, SandboxRecord, StoredState};
use crate::error::{Error, chain};
use crate::launch::{self, NewDisk, SnapshotFiles, VmFiles};
use crate::telemetry::TARGET;
use crate::{admission, clock, snapshots, touched};

/// The number successive owners of a control socket are told apart by.
pub const EPOCH: u32 = 1;

/// How long a child that starts keeps others waiting.
const START_SLOT: Duration = Duration::from_secs(5);

/// A checked wish for children.
#[derive(Debug, Clone)]
pub struct CreateRequest {
    /// What to start from.
    pub tag: Tag,
    /// How many.
    pub count: usize,
    /// Who asks.
    pub owner: String,
    /// When they are to be deleted.
    pub expires_at_unix: Option<u64>,
    /// Limit on host memory.
    pub memory_limit_mib: Option<u64>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// The workspace it is for.
    pub workspace: Option<String>,
    /// Use this id; only with one child.
    pub id: Option<SandboxId>,
}

/// A child that is being started.
struct Child {
    sandbox: Arc<Sandbox>,
    queue: mpsc::Receiver<Ask>,
    files: VmFiles,
    vmm: Vmm,
    events: VmmEvents,
    lease: Lease,
}

/// Starts children and answers when each has answered or failed.
pub async fn create(app: &Arc<App>, request: CreateRequest) -> Result<Vec<SandboxInfo>, Error> {
    let source = open(app, &request.tag).await?;
    create_from(app, request, source).await
}

/// A snapshot ready to be started from.
#[derive(Debug)]
pub struct SourceSnapshot {
    manifest: Arc<Manifest>,
    files: SnapshotFiles,
    /// Keeps the blobs until every child has its own lease.
    _lease: Lease,
}

/// Opens the files of a tag.
pub async fn open(app: &Arc<App>, tag: &Tag) -> Result<SourceSnapshot, Error> {
    if app.writing.is_writing(tag) {
        return Err(Error::StillWriting { tag: tag.clone() });
    }
    let tag = tag.clone();
    app.blocking(move |app| {
        let published = app
            .store
            .get(&tag)
            .map_err(Error::store(format!("snapshot {tag} cannot be used")))?;
        source(app, published)
    })
    .await
}

/// Opens the files of a snapshot.
pub fn source(app: &App, published: Published) -> Result<SourceSnapshot, Error> {
    Ok(SourceSnapshot {
        files: SnapshotFiles::open(&app.store, &app.touched, &published.manifest)?,
        manifest: published.manifest,
        _lease: published.lease,
    })
}

/// Starts children of an opened snapshot and answers when each has answered or failed.
pub async fn create_from(
    app: &Arc<App>,
    request: CreateRequest,
    source: SourceSnapshot,
) -> Result<Vec<SandboxInfo>, Error> {
    launch(app, request, source).await?.finish(app).await
}

/// Children that have an id, a process, files and an entry in the database, and are not started yet.
pub struct Launch {
    children: Vec<Child>,
    source: Arc<SourceSnapshot>,
    started: Instant,
    lost: usize,
    shape: forkd_vmm_proto::Shape,
}

/// Gets everything that children need. What is refused is refused here.
#[tracing::instrument(target = TARGET, skip_all, fields(forkd.snapshot = %request.tag, forkd.count = request.count))]
pub async fn launch(
    app: &Arc<App>,
    request: CreateRequest,
    source: SourceSnapshot,
) -> Result<Launch, Error> {
    let started = Instant::now();
    app.check_open()?;
    admission::check(app, &request)?;
    let manifest = Arc::clone(&source.manifest);
    let ids = new_ids(&request);
    let shape = launch::shape(manifest.memory_mib, manifest.vcpus, manifest.cpu);
    let taken = match app.launcher.take(shape, &ids).await {
        Ok(taken) => taken,
        Err(error) => {
            // They are taken in batches: those before the one that failed have processes.
            discard(app, ids).await;
            return Err(error.into());
        }
    };
    let lost = ids.len() - taken.len();
    let children = match prepare(app, &request, &manifest, taken).await {
        Ok(children) => children,
        Err(error) => {
            discard(app, ids).await;
            return Err(error);
        }
    };
    let records = children
        .iter()
        .map(|child| child.sandbox.record())
        .collect();
    if let Err(error) = app.db.put_sandboxes(records).await {
        join_all(children.into_iter().map(|child| abandon(app, child))).await;
        return Err(error.into());
    }
    Ok(Launch {
        children,
        source: Arc::new(source),
        started,
        lost,
        shape,
    })
}

impl Launch {
    /// The children as they are now.
    pub fn infos(&self) -> Vec<SandboxInfo> {
        self.children
            .iter()
            .map(|child| child.sandbox.info())
            .collect()
    }

    /// Starts them and answers when each has answered or failed.
    pub async fn finish(self, app: &Arc<App>) -> Result<Vec<SandboxInfo>, Error> {
        let results = join_all(
            self.children
                .into_iter()
                .map(|child| start_one(app, child, &self.source, self.started)),
        )
        .await;
        let outcome = acknowledge(app, results, self.lost).await;
        app.refill(self.shape);
        outcome
    }
}

/// Ends the processes of children that could not all be prepared, and removes what there is of them.
async fn discard(app: &Arc<App>, ids: Vec<SandboxId>) {
    for id in &ids {
        if let Err(error) = app.launcher.kill(id).await {
            tracing::error!(sandbox = %id, error = chain(&error), "the VMM process could not be ended");
            if matches!(error, SpawnerError::Connect { .. }) {
                // Without `forkd-spawn` there are no processes; each try would take seconds.
                break;
            }
        }
    }
    let removed = app.blocking(move |app| {
        for id in &ids {
            app.dirs.remove(id);
            app.cgroups.remove(id);
        }
        Ok(())
    });
    if let Err(error) = removed.await {
        tracing::warn!(error = error.chain(), "clean-up");
    }
}

fn new_ids(request: &CreateRequest) -> Vec<SandboxId> {
    let now = clock::unix();
    match &request.id {
        Some(id) => vec![id.clone()],
        None => (0..request.count)
            .map(|_| SandboxId::from_parts(now, rand::random()))
            .collect(),
    }
}

/// Makes the files of each child and enters all of them into the registry. After a failure the registry has none.
async fn prepare(
    app: &Arc<App>,
    request: &CreateRequest,
    manifest: &Arc<Manifest>,
    taken: Vec<Taken>,
) -> Result<Vec<Child>, Error> {
    let made = {
        let request = request.clone();
        let manifest = Arc::clone(manifest);
        app.blocking(move |app| {
            taken
                .into_iter()
                .map(|taken| one_child(app, &request, &manifest, taken))
                .collect::<Result<Vec<Unlinked>, Error>>()
        })
        .await?
    };
    let children = made
        .into_iter()
        .map(linked)
        .collect::<Result<Vec<Child>, Error>>()?;
    let sandboxes: Vec<_> = children
        .iter()
        .map(|child| Arc::clone(&child.sandbox))
        .collect();
    app.sandboxes
        .insert_all(&sandboxes, app.config.max_sandboxes)
        .map_err(|count| admission::too_many(count, app.config.max_sandboxes))?;
    Ok(children)
}

fn linked(child: Unlinked) -> Result<Child, Error> {
    let (vmm, events) =
        Vmm::new(child.control, EPOCH).map_err(Error::io("use", "the control socket of a VMM"))?;
    Ok(Child {
        sandbox: child.sandbox,
        queue: child.queue,
        files: child.files,
        vmm,
        events,
        lease: child.lease,
    })
}

/// A child whose control socket is not on the reactor yet.
struct Unlinked {
    sandbox: Arc<Sandbox>,
    queue: mpsc::Receiver<Ask>,
    files: VmFiles,
    control: std::os::fd::OwnedFd,
    lease: Lease,
}

fn one_child(
    app: &App,
    request: &CreateRequest,
    manifest: &Manifest,
    taken: Taken,
) -> Result<Unlinked, Error> {
    let id = taken.vm.id.clone();
    let disks: Vec<NewDisk> = manifest
        .disks
        .iter()
        .enumerate()
        .filter(|(_, disk)| !disk.read_only)
        .map(|(slot, disk)| NewDisk {
            slot,
            size: disk.base.bytes,
        })
        .collect();
    let limit = app.config.disk_limit_bytes;
    let limit = disk_budget::layer_limit(limit, &DiskUse::default(), disks.len() as u64);
    let files = app.dirs.create(&id, &disks, limit)?;
    let mut record = record(request, manifest, &taken, &files);
    record.inherited_disk_bytes = disk_budget::inherited(app, manifest);
    record.memory_limit_mib = app
        .cgroups
        .limit(&id, taken.vm.pid, request.memory_limit_mib);
    let lease = app.store.hold(record.blobs());
    let (sandbox, queue) = Sandbox::new(
        record,
        Phase::Launching,
        app.dirs.vsock(&id),
        app.dirs.console(&id),
    );
    Ok(Unlinked {
        sandbox: Arc::new(sandbox),
        queue,
        files,
        control: taken.control,
        lease,
    })
}

fn record(
    request: &CreateRequest,
    manifest: &Manifest,
    taken: &Taken,
    files: &VmFiles,
) -> SandboxRecord {
    let mut own = files.layers.iter().map(|(name, _)| name.clone());
    let disks = manifest
        .disks
        .iter()
        .map(|disk| {
            let mut layers: Vec<_> = disk.layers.iter().copied().map(LayerRef::Blob).collect();
            if !disk.read_only {
                layers.extend(own.next().map(LayerRef::Own));
            }
            DiskStack {
                base: disk.base,
                layers,
                read_only: disk.read_only,
                serial: disk.serial.clone(),
            }
        })
        .collect();
    SandboxRecord {
        id: taken.vm.id.clone(),
        state: StoredState::Launching,
        tag: request.tag.clone(),
        manifest: manifest.digest(),
        pid: taken.vm.pid,
        owner: request.owner.clone(),
        created_at_unix: clock::unix(),
        expires_at_unix: request.expires_at_unix,
        memory_limit_mib: request.memory_limit_mib,
        labels: request.labels.clone(),
        workspace: request.workspace.clone(),
        hostname: None,
        ready_us: None,
        failure: None,
        branch_count: 0,
        last_branch_memory_path: None,
        memory_mib: manifest.memory_mib,
        vcpus: manifest.vcpus,
        cpu: manifest.cpu,
        memory: manifest.memory.clone(),
        disks,
        network: manifest.network,
        source: manifest.source.clone(),
        built: None,
        checkpoints: Vec::new(),
        rolling_back: None,
        layer_count: 1,
        inherited_disk_bytes: 0,
        agent: manifest.versions.agent.clone(),
        numpy: manifest.versions.numpy.clone(),
    }
}

/// Restores one child and waits for its agent.
#[tracing::instrument(target = TARGET, name = "start", skip_all, fields(forkd.sandbox = %child.sandbox.id))]
async fn start_one(
    app: &Arc<App>,
    child: Child,
    source: &Arc<SourceSnapshot>,
    started: Instant,
) -> Result<Child, (Arc<Sandbox>, Error)> {
    let sandbox = Arc::clone(&child.sandbox);
    let launch = async {
        launch::restore(
            &child.vmm,
            &source.manifest,
            &source.files,
            &child.files,
            true,
        )
        .await?;
        metrics::histogram!("forkd_restore_seconds").record(started.elapsed().as_secs_f64());
        let client = sandbox
            .connect(app.config.ready_timeout)
            .await
            .map_err(|error| sandbox.unreachable(&error))?;
        let report = identity::assume(&client, &sandbox.id).await?;
        sandbox.keep_agent(Some(client)).await;
        Ok::<_, Error>(report)
    };
    let result = tokio::select! {
        result = in_turn(&app.start_slots, tokio::time::timeout(app.config.ready_timeout, launch)) => match result {
            Ok(result) => result,
            Err(_) => Err(Error::Timeout {
                what: format!("the start of sandbox {}", sandbox.id),
                seconds: app.config.ready_timeout.as_secs(),
            }),
        },
        () = sandbox.stop.cancelled() => Err(Error::Gone {
            id: sandbox.id.clone(),
            how: "it was deleted before it was ready".into(),
        }),
    };
    match result {
        Ok(report) => {
            metrics::histogram!("forkd_ready_seconds").record(started.elapsed().as_secs_f64());
            sandbox.update(|record| {
                record.state = StoredState::Running;
                record.hostname = Some(report.hostname);
                record.ready_us = Some(clock::micros(started.elapsed()));
            });
            // The daemon's own snapshots are started from once.
            if source.files.lacks_touched() && !snapshots::is_hidden(&source.manifest.tag) {
                touched::record(app, &child.vmm, source.manifest.state.digest).await;
            }
            Ok(child)
        }
        Err(error) => {
            metrics::counter!("forkd_launch_failures_total").increment(1);
            tracing::warn!(sandbox = %sandbox.id, error = error.chain(), "a child did not start");
            sandbox.step(Step::Ended);
            sandbox.set_error(error.code(), error.chain());
            app.events
                .tell(EventKind::SandboxFailed, &sandbox.id, Some(error.chain()));
            abandon(app, child).await;
            Err((sandbox, error))
        }
    }
}

/// Waits for a place among those that start at once: started all together, the last of many would answer no
/// earlier and every one of them as late as the last. A child that hangs gives its place up.
async fn in_turn<T>(slots: &Semaphore, start: impl Future<Output = T>) -> T {
    let slot = slots.acquire().await;
    tokio::pin!(start);
    if let Ok(done) = tokio::time::timeout(START_SLOT, &mut start).await {
        return done;
    }
    drop(slot);
    start.await
}

async fn abandon(app: &Arc<App>, child: Child) {
    let Child {
        sandbox,
        vmm,
        lease,
        ..
    } = child;
    drop(vmm);
    app.forget(&sandbox, lease).await;
}

/// Writes down which children run, hands each to its owner, and makes the answer.
async fn acknowledge(
    app: &Arc<App>,
    results: Vec<Result<Child, (Arc<Sandbox>, Error)>>,
    lost: usize,
) -> Result<Vec<SandboxInfo>, Error> {
    let records = results
        .iter()
        .flatten()
        .map(|child| child.sandbox.record())
        .collect();
    if let Err(error) = app.db.put_sandboxes(records).await {
        join_all(
            results
                .into_iter()
                .flatten()
                .map(|child| abandon(app, child)),
        )
        .await;
        return Err(error.into());
    }
    let mut infos = Vec::with_capacity(results.len() + lost);
    let mut first_error = None;
    let mut running = 0;
    for result in results {
        match result {
            Ok(child) => {
                child.sandbox.step(Step::Ready);
                running += 1;
                infos.push(child.sandbox.info());
                app.events
                    .tell(EventKind::SandboxReady, &child.sandbox.id, None);
                let owned = Owned {
                    app: Arc::clone(app),
                    sandbox: child.sandbox,
                    vmm: child.vmm,
                    events: child.events,
                    lease: child.lease,
                };
                tokio::spawn(drive(owned, child.queue));
            }
            Err((sandbox, error)) => {
                infos.push(sandbox.info());
                first_error.get_or_insert(error);
            }
        }
    }
    if running > 0 {
        return Ok(infos);
    }
    Err(first_error.unwrap_or_else(|| {
        Error::refused(
            ErrorCode::LaunchFailed,
            format!("{lost} VMM processes ended before they could be used"),
        )
    }))
}
