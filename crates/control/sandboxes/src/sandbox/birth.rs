//! How a sandbox gets its VM: launched from a snapshot, adopted from an earlier daemon, or lost with its VM.
//!
//! Each child becomes ready by itself. It waits for its own shell and its own guest, never for a sibling.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_api::{ErrorCode, EventKind};
use forkd_guest_proto::IdentityReport;
use forkd_vmm_link::Vmm;
use forkd_vmm_proto::{Capability, Command, PROTOCOL_VERSION, Reply, VmmPhase};
use tokio::sync::{Semaphore, oneshot};

use super::checkpoint::CheckpointAsk;
use super::handle::SandboxHandle;
use super::headroom;
use super::identity;
use super::layers::vm_files;
use super::owner::{Ask, SandboxOwner};
use super::source::SourceSnapshot;
use super::state::Step;
use crate::app::App;
use crate::error::Error;
use crate::launch::{self, StartedVm, VmFiles};
use crate::state::StoredState;
use crate::trace::TARGET;
use crate::{agent_limits, clock, touched};

/// The number successive owners of a control socket are told apart by.
pub const EPOCH: u32 = 1;
/// How long a starting child keeps its place among those that start at once.
const START_SLOT: Duration = Duration::from_secs(5);
/// How long a VMM may take to say which pages were touched.
const RECORD: Duration = Duration::from_secs(2);
/// How long an adopted VMM may take to answer.
const STATUS: Duration = Duration::from_secs(10);

/// Where a sandbox's VM comes from.
pub enum Birth {
    /// A shell that is filled from a snapshot.
    Launch(Launch),
    /// A VM that an earlier daemon started.
    Adopt(Adoption),
    /// There is no VM any more; the sandbox is shown as failed until it is deleted.
    Lost(String),
}

/// A child that is started.
pub struct Launch {
    /// The snapshot, opened once for all children of a request.
    pub source: Arc<SourceSnapshot>,
    /// The shell, when `forkd-spawn` has handed it out.
    pub shell: oneshot::Receiver<Result<StartedVm, Error>>,
    /// When the request came.
    pub started: Instant,
}

/// A VM that an earlier daemon started.
pub struct Adoption {
    /// The VM and its control socket.
    pub taken: StartedVm,
    /// Tells answers to this daemon from those to the daemon before.
    pub epoch: u32,
}

/// A sandbox without a VM.
pub(super) enum Stillborn {
    /// It never ran: nothing of it is kept.
    Removed,
    /// It ran once: it stays visible as failed.
    Kept,
}

/// Gives a sandbox its VM.
pub(super) async fn bear(
    app: &Arc<App>,
    sandbox: &Arc<SandboxHandle>,
    birth: Birth,
) -> Result<SandboxOwner, Stillborn> {
    match birth {
        Birth::Launch(launch) => launch_child(app, sandbox, launch).await,
        Birth::Adopt(adoption) => adopt(app, sandbox, adoption).await,
        Birth::Lost(how) => {
            lost(app, sandbox, how).await;
            Err(Stillborn::Kept)
        }
    }
}

#[tracing::instrument(target = TARGET, name = "start", skip_all, fields(forkd.sandbox = %sandbox.id))]
async fn launch_child(
    app: &Arc<App>,
    sandbox: &Arc<SandboxHandle>,
    launch: Launch,
) -> Result<SandboxOwner, Stillborn> {
    let source = Arc::clone(&launch.source);
    let launched = tokio::select! {
        launched = fill_shell(app, sandbox, launch) => launched,
        () = sandbox.stop.cancelled() => Err(Error::Gone {
            id: sandbox.id.clone(),
            how: "it was deleted before it was ready".into(),
        }),
    };
    if let Ok(owner) = &launched {
        record_touched(owner, &source).await;
    }
    launched.map_err(|error| {
        metrics::counter!("forkd_launch_failures_total").increment(1);
        tracing::warn!(sandbox = %sandbox.id, error = error.chain(), "a child did not start");
        sandbox.set_error(error.code(), error.chain(), error.hint());
        sandbox.step(Step::Ended);
        app.events
            .tell(EventKind::SandboxFailed, &sandbox.id, Some(error.chain()));
        Stillborn::Removed
    })
}

/// From a shell to a running, recorded sandbox.
async fn fill_shell(
    app: &Arc<App>,
    sandbox: &Arc<SandboxHandle>,
    launch: Launch,
) -> Result<SandboxOwner, Error> {
    let Launch {
        source,
        shell,
        started,
    } = launch;
    let taken = shell.await.map_err(|_| Error::Task)??;
    let record = sandbox.update(|record| record.pid = Some(taken.vm.pid));
    let (vmm, events) = Vmm::new(taken.control, EPOCH, taken.vm.capabilities)
        .map_err(Error::io("use", "the control socket of a VMM"))?;
    let owner = SandboxOwner {
        app: Arc::clone(app),
        sandbox: Arc::clone(sandbox),
        lease: app.store.hold(record.blobs()),
        vmm,
        events,
        ended: None,
        recorded: true,
        connections_lost: false,
    };
    let limit = app.config.ready_timeout;
    let ready = tokio::time::timeout(limit, become_ready(&owner, &source, started));
    let (files, report) = in_turn(&app.start_slots, ready).await.unwrap_or_else(|_| {
        Err(Error::Timeout {
            what: format!("the start of sandbox {}", sandbox.id),
            seconds: limit.as_secs(),
        })
    })?;
    let host_ports = owner.bind_ports().await?;
    let netns = match sandbox.record().per_child_netns {
        true => app.namespaces.create().await,
        false => None,
    };
    // Before the record is durable: whatever ends this sandbox removes it.
    sandbox.update(|record| record.netns.clone_from(&netns));
    metrics::histogram!("forkd_ready_seconds").record(started.elapsed().as_secs_f64());
    owner
        .save(|record| {
            record.add_layers(files.layers.iter().map(|layer| (layer.slot, &layer.name)));
            record.state = StoredState::Running;
            record.hostname = Some(report.hostname);
            record.ready_us = Some(clock::micros(started.elapsed()));
            for (port, listener) in &host_ports {
                if let Some(settings) = record.ports.ports.get_mut(port) {
                    settings.host = Some(listener.address);
                }
            }
        })
        .await?;
    owner.open_ports(host_ports).await;
    if let Some(name) = &netns {
        app.namespaces.serve(sandbox, name);
    }
    sandbox.step(Step::Ready);
    app.events.tell(EventKind::SandboxReady, &sandbox.id, None);
    Ok(owner)
}

/// Records which pages the child touched, if none of its siblings did. The client has its answer by now and may delete
/// the child at once: the deletion waits for the record, because the next children are slower without it.
async fn record_touched(owner: &SandboxOwner, source: &SourceSnapshot) {
    if source.records_touched() && owner.vmm.capabilities().contains(Capability::Prefault) {
        let key = touched::key(&source.manifest);
        let recorded = touched::record(&owner.app, &owner.vmm, key);
        if tokio::time::timeout(RECORD, recorded).await.is_err() {
            tracing::warn!(sandbox = %owner.sandbox.id, "the VMM did not say which pages were touched");
        }
    }
}

/// Creates the files of the VM, restores it and gives its guest an identity of its own: when this returns, the child is
/// ready. The network engine gets its end of the frame socket at the same time; frames of the guest wait in the socket
/// until then.
async fn become_ready(
    owner: &SandboxOwner,
    source: &SourceSnapshot,
    started: Instant,
) -> Result<(VmFiles, IdentityReport), Error> {
    let frames = owner.frame_socket()?;
    let starting = start_guest(
        owner,
        source,
        frames.as_ref().map(|frames| &frames.vmm),
        started,
    );
    let attaching = async {
        match &frames {
            Some(frames) => owner.attach(frames).await,
            None => Ok(()),
        }
    };
    let (guest, attached) = tokio::join!(starting, attaching);
    // Only the VMM and the engine may hold the socket: each learns of the end of the other by it.
    drop(frames);
    let guest = guest?;
    owner.attach_or_refuse(attached).await?;
    Ok(guest)
}

async fn start_guest(
    owner: &SandboxOwner,
    source: &SourceSnapshot,
    frames: Option<&OwnedFd>,
    started: Instant,
) -> Result<(VmFiles, IdentityReport), Error> {
    let sandbox = &owner.sandbox;
    let record = sandbox.record();
    let files = owner
        .app
        .blocking(move |app| vm_files(app, &record))
        .await?;
    let (manifest, snapshot) = (&source.manifest, &source.files);
    launch::restore(&owner.vmm, manifest, snapshot, &files, frames, true).await?;
    metrics::histogram!("forkd_restore_seconds").record(started.elapsed().as_secs_f64());
    let (client, report) = identity::assume(sandbox, owner.app.config.ready_timeout).await?;
    sandbox.keep_agent(Some(client)).await;
    Ok((files, report))
}

/// Waits for a place among the children that start at once. Without places, a hundred children that start together would
/// each be as late as the last. A child that hangs gives its place up after [`START_SLOT`].
async fn in_turn<T>(slots: &Semaphore, start: impl Future<Output = T>) -> T {
    let slot = slots.acquire().await;
    tokio::pin!(start);
    if let Ok(done) = tokio::time::timeout(START_SLOT, &mut start).await {
        return done;
    }
    drop(slot);
    start.await
}

async fn adopt(
    app: &Arc<App>,
    sandbox: &Arc<SandboxHandle>,
    adoption: Adoption,
) -> Result<SandboxOwner, Stillborn> {
    let pid = adoption.taken.vm.pid;
    match take_over(app, sandbox, adoption).await {
        Ok(owner) => {
            tracing::info!(sandbox = %sandbox.id, pid, "adopted");
            Ok(owner)
        }
        Err(error) => {
            tracing::warn!(sandbox = %sandbox.id, error = error.chain(), "not adopted");
            if let Err(error) = app.launcher.kill(&sandbox.id).await {
                tracing::error!(sandbox = %sandbox.id, error = crate::error::chain(&error), "the VMM process was not ended");
            }
            lost(
                app,
                sandbox,
                "its VMM did not answer after a restart".into(),
            )
            .await;
            Err(Stillborn::Kept)
        }
    }
}

async fn take_over(
    app: &Arc<App>,
    sandbox: &Arc<SandboxHandle>,
    adoption: Adoption,
) -> Result<SandboxOwner, Error> {
    let Adoption { taken, epoch } = adoption;
    let (vmm, events) = Vmm::new(taken.control, epoch, taken.vm.capabilities)
        .map_err(Error::io("use", "the control socket of a VMM"))?;
    let mut owner = SandboxOwner {
        app: Arc::clone(app),
        sandbox: Arc::clone(sandbox),
        lease: app.store.hold(sandbox.record().blobs()),
        vmm,
        events,
        ended: None,
        recorded: true,
        connections_lost: false,
    };
    if sandbox.record().memory_limit_mib.is_some() {
        // The earlier daemon may have died in a cut.
        headroom::restore(app, &sandbox.record()).await;
    }
    let paused = is_paused(&mut owner).await?;
    // Whether the last cut of the earlier daemon succeeded is not known, so the next builds on the start.
    let record = sandbox.update(|record| record.built = None);
    sandbox.step(Step::Ready);
    if paused && record.state == StoredState::Paused {
        sandbox.step(Step::Pause);
    } else if paused {
        // The daemon died while it held the source of a cut.
        owner.call(Command::Resume, &[]).await?;
    }
    thaw_left(sandbox);
    owner.open_ports_again().await;
    if let Some(name) = &record.netns {
        app.namespaces.serve(sandbox, name);
    }
    if let Some(unfinished) = record.rolling_back {
        // Going back a second time leads to the same state.
        let (done, _) = oneshot::channel();
        let again = CheckpointAsk::Rollback {
            to: Some(unfinished),
            done,
        };
        sandbox.ask(Ask::Checkpoint(Box::new(again)))?;
    }
    Ok(owner)
}

/// Thaws the user processes of an adopted guest: a daemon that died around a cut may have left them frozen. The guest may
/// not answer, so adoption does not wait for it.
fn thaw_left(sandbox: &Arc<SandboxHandle>) {
    let sandbox = Arc::clone(sandbox);
    tokio::spawn(async move {
        let Ok(client) = sandbox.agent().await else {
            return;
        };
        if let Err(error) = client.by(agent_limits::answer()).thaw().await {
            tracing::debug!(sandbox = %sandbox.id, error = crate::error::chain(&error), "not thawed");
        }
    });
}

async fn is_paused(owner: &mut SandboxOwner) -> Result<bool, Error> {
    let hello = Command::Hello {
        version: PROTOCOL_VERSION,
    };
    let asking = async {
        owner.call(hello, &[]).await?;
        owner.call(Command::Status, &[]).await
    };
    let reply = tokio::time::timeout(STATUS, asking)
        .await
        .map_err(|_| Error::Timeout {
            what: "the VMM's answer".into(),
            seconds: STATUS.as_secs(),
        })??;
    match reply {
        Reply::Status(status) if status.phase == VmmPhase::Running => Ok(false),
        Reply::Status(status) if status.phase == VmmPhase::Paused => Ok(true),
        _ => Err(Error::Task),
    }
}

/// Shows a sandbox whose VM is gone as failed.
async fn lost(app: &Arc<App>, sandbox: &SandboxHandle, how: String) {
    let known = sandbox.record().state == StoredState::Failed;
    let record = sandbox.update(|record| {
        record.state = StoredState::Failed;
        record.failure = Some(how.clone());
    });
    sandbox.set_error(ErrorCode::SandboxGone, how, None);
    sandbox.step(Step::Ended);
    if !known {
        app.write_down(record).await;
    }
}
