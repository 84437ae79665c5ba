//! Starting children of a snapshot.
//!
//! The request is refused as a whole or every child gets an ID and an owner at once. From then on each child is on its own:
//! it becomes ready, durable and usable, or fails, without waiting for a sibling.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_api::{ErrorCode, SandboxInfo};
use forkd_types::{Policy, SandboxId, Tag};
use forkd_vmm_proto::spawn::Limits;
use forkd_vmm_proto::{Capability, Shape};
use tokio::sync::oneshot;

use super::secrets;
use crate::app::App;
use crate::clock;
use crate::error::{Error, chain};
use crate::host_limits::HostLimits;
use crate::launch::{self, StartedVm};
use crate::limits::VmSlot;
use crate::sandbox::birth::{Birth, Launch};
use crate::sandbox::disk_budget;
use crate::sandbox::{SandboxHandle, SourceSnapshot, owner};
use crate::state::{
    DiskStack, LayerRef, NetworkRecord, OnExpiry, PortsRecord, RECORD_VERSION, SandboxRecord,
    StoredState,
};
use crate::trace::{self, TARGET};

/// How long an answer waits until a child that failed is removed.
const REMOVED: Duration = Duration::from_secs(10);

/// A checked request for children.
#[derive(Debug, Clone)]
pub struct CreateRequest {
    /// The snapshot to start from.
    pub tag: Tag,
    pub count: usize,
    pub owner: String,
    /// When they are to be deleted.
    pub expires_at_unix: Option<u64>,
    /// Whether they are deleted or suspended then.
    pub on_expiry: OnExpiry,
    /// Limit on host memory.
    pub memory_limit_mib: Option<u64>,
    /// The other limits on host resources.
    pub limits: HostLimits,
    pub network: Policy,
    pub labels: BTreeMap<String, String>,
    /// Environment of every program that is started through an API.
    pub env: BTreeMap<String, String>,
    /// Free data of the client.
    pub metadata: BTreeMap<String, String>,
    /// The workspace it is for.
    pub workspace: Option<String>,
    /// Use this ID; only with one child.
    pub id: Option<SandboxId>,
    pub ports: PortsRecord,
    /// Give each child a network namespace, if the daemon may.
    pub per_child_netns: bool,
}

impl CreateRequest {
    /// The host resources that each child may use.
    fn limits(&self, app: &App) -> Result<Limits, Error> {
        Ok(self
            .limits
            .for_host(self.memory_limit_mib, &app.config.data_dir)?)
    }
}

/// Starts children of a tag and waits until each is ready or has failed.
pub async fn create(app: &Arc<App>, request: CreateRequest) -> Result<Vec<SandboxInfo>, Error> {
    let children = start(app, request).await?;
    ready(&children).await
}

/// Starts children of a tag. Every refusal that is possible before the start happens here.
pub async fn start(
    app: &Arc<App>,
    request: CreateRequest,
) -> Result<Vec<Arc<SandboxHandle>>, Error> {
    app.check_open()?;
    app.check_network(&request.network)?;
    secrets::check(app, &request.owner, &request.network).await?;
    let source = SourceSnapshot::open(app, &request.tag).await?;
    let slots = app.limits.children(&request.owner, request.count)?;
    start_from(app, &request, source, slots).await
}

/// Waits until each child is ready or has failed. Children that failed are in the answer with their error; if all failed,
/// the answer is the error of the first.
pub async fn ready(children: &[Arc<SandboxHandle>]) -> Result<Vec<SandboxInfo>, Error> {
    for child in children {
        child.launched().await;
        if child.failure().is_some() {
            // The answer comes when nothing of a failed child is left, unless its process does not end.
            let _ = tokio::time::timeout(REMOVED, child.gone.cancelled()).await;
        }
    }
    let infos: Vec<_> = children.iter().map(|child| child.info()).collect();
    let failures: Vec<_> = children.iter().map(|child| child.failure()).collect();
    if failures.iter().all(Option::is_some)
        && let Some(error) = failures.into_iter().flatten().next()
    {
        return Err(error);
    }
    Ok(infos)
}

/// Gives every child an ID and an owner, and fetches the shells for them.
#[tracing::instrument(target = TARGET, name = "launch", skip_all, fields(forkd.snapshot = %source.manifest.tag, forkd.count = request.count))]
pub async fn start_from(
    app: &Arc<App>,
    request: &CreateRequest,
    source: SourceSnapshot,
    slots: Vec<VmSlot>,
) -> Result<Vec<Arc<SandboxHandle>>, Error> {
    let started = Instant::now();
    let manifest = Arc::clone(&source.manifest);
    let engine = launch::engine::for_children(&app.launcher, &manifest).await?;
    let shape = launch::shape(engine, manifest.memory_mib, manifest.vcpus, manifest.cpu);
    let limits = request.limits(app)?;
    let inherited = disk_budget::inherited(app, &manifest);
    let source = Arc::new(source);
    let mut children = Vec::with_capacity(slots.len());
    let mut waiting = Vec::with_capacity(slots.len());
    for (id, slot) in new_ids(app, request).into_iter().zip(slots) {
        let (hand_over, shell) = oneshot::channel();
        let launch = Launch {
            source: Arc::clone(&source),
            shell,
            started,
        };
        let mut record = record(request, &source, inherited, id.clone());
        record
            .network
            .place(|name| secrets::placeholder(app, &request.owner, name))?;
        children.push(owner::start(app, record, slot, Birth::Launch(launch)));
        waiting.push((id, hand_over));
    }
    trace::spawn(hand_out(
        Arc::clone(app),
        shape,
        limits,
        waiting,
        children.clone(),
    ));
    Ok(children)
}

type Waiting = Vec<(SandboxId, oneshot::Sender<Result<StartedVm, Error>>)>;

/// Fetches shells and hands each to its owner as soon as it is there. Each child asks for its own, so none waits for the
/// shell of a sibling.
async fn hand_out(
    app: Arc<App>,
    shape: Shape,
    limits: Limits,
    waiting: Waiting,
    children: Vec<Arc<SandboxHandle>>,
) {
    let count = u32::try_from(waiting.len()).unwrap_or(u32::MAX);
    app.demand.begin(count, Instant::now());
    let takes = waiting.into_iter().map(|(id, owner)| {
        let (app, limits) = (&app, &limits);
        async move {
            let shell = take(app, shape, &id, limits).await;
            let pooled = shell.as_ref().is_ok_and(can_be_pooled);
            // A child that was deleted meanwhile does not listen; its owner ends the process.
            let _ = owner.send(shell);
            pooled
        }
    });
    let pooled = futures::future::join_all(takes).await.contains(&true);
    for child in &children {
        child.launched().await;
    }
    // The last of the children that start at the same time: shells that are made now compete with none of them.
    if !app.demand.end(count) || !pooled {
        return;
    }
    if let Err(error) = app.keep_ready(shape).await {
        tracing::debug!(error = chain(&error), "the pool was not set");
    }
}

/// Whether the engine of a VM has shells that can stand ready.
fn can_be_pooled(started: &StartedVm) -> bool {
    started.vm.capabilities.contains(Capability::PooledShells)
}

async fn take(
    app: &App,
    shape: Shape,
    id: &SandboxId,
    limits: &Limits,
) -> Result<StartedVm, Error> {
    let taken = app
        .launcher
        .take(shape, std::slice::from_ref(id), limits)
        .await?;
    taken
        .into_iter()
        .find(|taken| taken.vm.id == *id)
        .ok_or_else(|| {
            Error::refused(
                ErrorCode::LaunchFailed,
                "the VMM process ended before it could be used",
            )
        })
}

fn new_ids(app: &App, request: &CreateRequest) -> Vec<SandboxId> {
    let (now, node) = (clock::unix(), app.config.node.as_ref());
    match &request.id {
        Some(id) => vec![id.clone()],
        None => (0..request.count)
            .map(|_| SandboxId::on(node, now, rand::random()))
            .collect(),
    }
}

fn record(
    request: &CreateRequest,
    source: &SourceSnapshot,
    inherited_disk_bytes: u64,
    id: SandboxId,
) -> SandboxRecord {
    let manifest = &source.manifest;
    let disks = manifest
        .disks
        .iter()
        .map(|disk| DiskStack {
            base: disk.base,
            layers: disk.layers.iter().copied().map(LayerRef::Blob).collect(),
            read_only: disk.read_only,
            serial: disk.serial.clone(),
        })
        .collect();
    SandboxRecord {
        version: RECORD_VERSION,
        id,
        state: StoredState::Launching,
        tag: source.lineage.tag.clone(),
        manifest: source.lineage.digest,
        pid: None,
        owner: request.owner.clone(),
        created_at_unix: clock::unix(),
        expires_at_unix: request.expires_at_unix,
        on_expiry: request.on_expiry,
        memory_limit_mib: request.memory_limit_mib,
        limits: request.limits,
        network: NetworkRecord::first(&request.network),
        labels: request.labels.clone(),
        env: request.env.clone(),
        metadata: request.metadata.clone(),
        workspace: request.workspace.clone(),
        hostname: None,
        ready_us: None,
        failure: None,
        branch_count: 0,
        last_branch_memory_path: None,
        engine: manifest.engine,
        memory_mib: manifest.memory_mib,
        vcpus: manifest.vcpus,
        cpu: manifest.cpu,
        memory: manifest.memory.clone(),
        disks,
        source: manifest.source.clone(),
        built: None,
        checkpoints: Vec::new(),
        rolling_back: None,
        layer_count: 0,
        inherited_disk_bytes,
        agent: manifest.versions.agent.clone(),
        numpy: manifest.versions.numpy.clone(),
        ports: request.ports.clone(),
        per_child_netns: request.per_child_netns,
        netns: None,
    }
}
