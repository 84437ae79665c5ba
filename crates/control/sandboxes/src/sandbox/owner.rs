//! The task that owns a sandbox.
//!
//! A [`SandboxOwner`] exists as long as the sandbox's ID does. Its first state is launching or being adopted
//! ([`super::birth`]). Then the owner serves its queue of [`Ask`]s, one at a time, until the sandbox is deleted, expires
//! or its VM ends.
//!
//! Invariants: only the owner changes the record, and a change is durable before any client learns of it
//! ([`SandboxOwner::save`]).

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorCode, EventKind, SandboxInfo};
use forkd_store::Lease;
use forkd_types::SecretName;
use forkd_vmm_link::{Vmm, VmmCallError, VmmEvents};
use forkd_vmm_proto::{Capability, Command, Counters, Event, Reply, StopCause};
use tokio::sync::{mpsc, oneshot};
use tracing::{Instrument, Span};

use super::birth::{self, Birth};
use super::checkpoint::{self, CheckpointAsk};
use super::cut::{self, CutAsk};
use super::handle::SandboxHandle;
use super::network::NetworkChange;
use super::ports::{HostPort, PortChange};
use super::state::Step;
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::host_limits::HostLimits;
use crate::limits::VmSlot;
use crate::ops::secrets;
use crate::state::{OnExpiry, SandboxRecord, StoredState};

/// How long a VMM may take to end when asked.
const STOP: Duration = Duration::from_secs(2);
/// How long a VMM may take to pause, resume or count.
const QUICK: Duration = Duration::from_secs(10);

/// Seconds until a suspend that failed is tried again.
const SUSPEND_AGAIN: u64 = 60;

/// A request to a sandbox's owner.
#[derive(Debug)]
pub enum Ask {
    /// Capture the VM.
    Cut(Box<CutAsk>),
    /// Keep a point to go back to, or go back.
    Checkpoint(Box<CheckpointAsk>),
    /// Stop its vCPUs.
    Pause(oneshot::Sender<Result<(), Error>>),
    /// Let them go on.
    Resume(oneshot::Sender<Result<(), Error>>),
    /// Read the counters of the VMM.
    Counters(oneshot::Sender<Result<Counters, Error>>),
    /// Make sure that the network engine serves the sandbox with the policy of its record.
    CheckNetwork,
    /// Change what users may set.
    Update(Box<Changes>, oneshot::Sender<Result<SandboxInfo, Error>>),
}

/// New values for what users may set; `None` leaves a value as it is.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    /// When the sandbox is deleted; `Some(None)` is never.
    pub expires_at_unix: Option<Option<u64>>,
    pub labels: Option<BTreeMap<String, String>>,
    /// The memory limit in MiB and the other limits, all of them.
    pub limits: Option<(Option<u64>, HostLimits)>,
    pub network: Option<NetworkChange>,
    pub port: Option<PortChange>,
}

impl Ask {
    /// Answers that there is no VM any more. The caller may have stopped waiting.
    fn refuse(self, sandbox: &SandboxHandle) {
        match self {
            Self::Cut(ask) => ask.refuse(sandbox.not_running()),
            Self::Checkpoint(ask) => ask.refuse(sandbox.not_running()),
            Self::Pause(done) | Self::Resume(done) => drop(done.send(Err(sandbox.not_running()))),
            Self::Counters(done) => drop(done.send(Err(sandbox.not_running()))),
            Self::CheckNetwork => {}
            Self::Update(_, done) => drop(done.send(Err(sandbox.not_running()))),
        }
    }
}

/// How a VM ended, as far as its VMM said.
pub(crate) type Ended = Option<StopCause>;

/// Everything that belongs to one sandbox with a VM.
pub struct SandboxOwner {
    pub(crate) app: Arc<App>,
    /// The shared part.
    pub(crate) sandbox: Arc<SandboxHandle>,
    /// The control socket.
    pub(crate) vmm: Vmm,
    /// Messages that the VMM sends unasked.
    pub(crate) events: VmmEvents,
    /// Keeps the blobs that the sandbox uses.
    pub(crate) lease: Lease,
    /// Set once the VM has ended.
    pub(crate) ended: Option<Ended>,
    /// The record is in the database. False for a parent that is built: no restart finds it again.
    pub(crate) recorded: bool,
    /// The engine that had the connections of the guest is gone, and the guest was not told.
    pub(crate) connections_lost: bool,
}

/// Enters a sandbox and starts its owner.
pub fn start(
    app: &Arc<App>,
    record: SandboxRecord,
    slot: VmSlot,
    birth: Birth,
) -> Arc<SandboxHandle> {
    let (sandbox, queue) = SandboxHandle::new(
        record.clone(),
        app.dirs.vsock(&record.id),
        app.dirs.console(&record.id),
    );
    let sandbox = Arc::new(sandbox);
    app.sandboxes.insert(&sandbox);
    // The birth is part of the trace of the request; the life after it is not.
    let span = Span::current();
    tokio::spawn(live(
        Arc::clone(app),
        Arc::clone(&sandbox),
        queue,
        slot,
        birth,
        span,
    ));
    sandbox
}

/// A sandbox from birth to the last of its files. The slot is given back at the end.
async fn live(
    app: Arc<App>,
    sandbox: Arc<SandboxHandle>,
    mut queue: mpsc::Receiver<Ask>,
    mut slot: VmSlot,
    birth: Birth,
    span: Span,
) {
    let lease = match birth::bear(&app, &sandbox, birth).instrument(span).await {
        Ok(mut owner) => {
            slot.started();
            owner.serve(&mut queue).await;
            sandbox.step(Step::Stop);
            queue.close();
            owner.end().await
        }
        Err(birth::Stillborn::Removed) => {
            queue.close();
            app.store.hold([])
        }
        Err(birth::Stillborn::Kept) => {
            serve_failed(&app, &sandbox, &mut queue).await;
            sandbox.step(Step::Stop);
            queue.close();
            app.store.hold([])
        }
    };
    app.forget(&sandbox, lease).await;
    drop(slot);
}

impl SandboxOwner {
    /// The owner of a parent that is built: not registered, and not in the database.
    pub(crate) fn of_parent(
        app: &Arc<App>,
        record: SandboxRecord,
        vmm: Vmm,
        events: VmmEvents,
    ) -> Self {
        let lease = app.store.hold(record.blobs());
        let (vsock, console) = (app.dirs.vsock(&record.id), app.dirs.console(&record.id));
        let (sandbox, _queue) = SandboxHandle::new(record, vsock, console);
        Self {
            app: Arc::clone(app),
            sandbox: Arc::new(sandbox),
            vmm,
            events,
            lease,
            ended: None,
            recorded: false,
            connections_lost: false,
        }
    }

    /// Changes the record and makes the change durable.
    pub(crate) async fn save(
        &self,
        change: impl FnOnce(&mut SandboxRecord),
    ) -> Result<SandboxRecord, Error> {
        let record = self.sandbox.update(change);
        if self.recorded {
            self.app.db.put_sandboxes(vec![record.clone()]).await?;
        }
        Ok(record)
    }

    /// Refuses an operation that the engine of this VM does not have.
    pub(crate) fn require(&self, capability: Capability) -> Result<(), Error> {
        if self.vmm.capabilities().contains(capability) {
            return Ok(());
        }
        let engine = self.sandbox.record().engine;
        Err(Error::hinted(
            ErrorCode::Unsupported,
            format!(
                "sandbox {} runs on the engine {engine}, which lacks {capability}",
                self.sandbox.id
            ),
            "build the snapshot on the engine forkd (forkd snapshot --engine forkd) and start the sandbox from it"
                .to_owned(),
        ))
    }

    /// Sends a command to the VMM, and notices its end.
    pub(crate) async fn call(
        &mut self,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Reply, Error> {
        self.call_noting(command, fds, |_| {})
            .await?
            .map_err(Error::vmm("the VMM refused the command"))
    }

    /// As [`Self::call`], with the events that arrive before the answer. The caller names what the VMM refused.
    pub(crate) async fn call_noting(
        &mut self,
        command: Command,
        fds: &[BorrowedFd<'_>],
        mut note: impl FnMut(Event),
    ) -> Result<Result<Reply, VmmCallError>, Error> {
        let gone = |how: &str| Error::Gone {
            id: self.sandbox.id.clone(),
            how: how.into(),
        };
        let call = self.vmm.call(command, fds);
        tokio::pin!(call);
        let mut cause = None;
        loop {
            tokio::select! {
                // Events that the VMM sent before its answer are noted before the answer is used.
                biased;
                event = self.events.next() => match event.map(|event| event.event) {
                    Some(Event::Stopped { cause: found }) => cause = Some(found),
                    Some(event) => note(event),
                    None => {
                        self.ended = Some(cause);
                        return Err(gone("the VM ended"));
                    }
                },
                reply = &mut call => return Ok(reply),
                () = self.sandbox.stop.cancelled() => return Err(gone("it was deleted")),
            }
        }
    }

    /// Serves the queue until the sandbox is deleted, expires, or fails and is deleted then.
    async fn serve(&mut self, queue: &mut mpsc::Receiver<Ask>) {
        let mut cause = None;
        loop {
            match self.next(queue).await {
                Next::Event(event) => cause = self.note(event).or(cause),
                Next::Ask(ask) => {
                    self.answer(ask).await;
                    if let Some(ended) = self.ended.take() {
                        cause = ended.or(cause);
                    }
                }
                Next::Stop => return,
                Next::Expired => {
                    tracing::info!(sandbox = %self.sandbox.id, "expired");
                    if !self.suspends().await {
                        return;
                    }
                }
                Next::Ended => {
                    self.fail(cause).await;
                    return serve_failed(&self.app, &self.sandbox, queue).await;
                }
            }
        }
    }

    /// Starts the suspend of a sandbox that is to be suspended when its time is over. A suspend that fails is tried
    /// again later, so the state is not lost.
    async fn suspends(&self) -> bool {
        if self.sandbox.record().on_expiry != OnExpiry::Suspend {
            return false;
        }
        let again = clock::unix().saturating_add(SUSPEND_AGAIN);
        if let Err(error) = self
            .save(|record| record.expires_at_unix = Some(again))
            .await
        {
            tracing::error!(sandbox = %self.sandbox.id, error = error.chain(), "not written down");
        }
        let (app, id) = (Arc::clone(&self.app), self.sandbox.id.clone());
        tokio::spawn(async move {
            if let Err(error) = crate::ops::pause::pause(&app, &id).await {
                tracing::error!(sandbox = %id, error = error.chain(), "not suspended when its time was over");
            }
        });
        true
    }

    async fn next(&mut self, queue: &mut mpsc::Receiver<Ask>) -> Next {
        let remaining = remaining(&self.sandbox);
        // Checked first: a guest that makes events without end would otherwise never expire.
        if remaining.is_some_and(|left| left.is_zero()) {
            return Next::Expired;
        }
        tokio::select! {
            biased;
            () = self.sandbox.stop.cancelled() => Next::Stop,
            event = self.events.next() => match event {
                Some(event) => Next::Event(event.event),
                None => Next::Ended,
            },
            () = sleep_for(remaining) => Next::Expired,
            ask = queue.recv() => match ask {
                Some(ask) => Next::Ask(ask),
                None => Next::Stop,
            },
        }
    }

    fn note(&self, event: Event) -> Ended {
        match event {
            Event::Stopped { cause } => return Some(cause),
            Event::DeviceFailed { device, reason } => {
                metrics::counter!("forkd_device_errors_total").increment(1);
                tracing::warn!(sandbox = %self.sandbox.id, ?device, reason, "device failed");
            }
            Event::AgentReady | Event::CutTaken { .. } | Event::VsockConnect { .. } => {}
        }
        None
    }

    async fn answer(&mut self, ask: Ask) {
        match ask {
            Ask::Cut(ask) => cut::serve(self, *ask).await,
            Ask::Checkpoint(ask) => checkpoint::serve(self, *ask).await,
            Ask::Pause(reply) => {
                let result = self
                    .change(Step::Pause, Command::Pause, StoredState::Paused)
                    .await;
                let _ = reply.send(result);
            }
            Ask::Resume(reply) => {
                let result = self
                    .change(Step::Resume, Command::Resume, StoredState::Running)
                    .await;
                let _ = reply.send(result);
                self.break_connections().await;
            }
            Ask::Counters(reply) => {
                let _ = reply.send(self.counters().await);
            }
            Ask::CheckNetwork => {
                if let Err(error) = self.check_network().await {
                    tracing::warn!(sandbox = %self.sandbox.id, error = error.chain(), "no network");
                }
            }
            Ask::Update(changes, reply) => {
                let answer = self.update(*changes).await;
                let _ = reply.send(answer.map(|()| self.sandbox.info()));
            }
        }
    }

    /// Changes what users may set. New limits are in force before the record has them; a network policy is durable before
    /// it is in force.
    async fn update(&mut self, changes: Changes) -> Result<(), Error> {
        let mut changes = changes.resolved(&self.sandbox)?;
        if let Some(NetworkChange::Replace(policy)) = &changes.network {
            self.app.check_network(policy)?;
            secrets::check(&self.app, &self.sandbox.owner(), policy).await?;
        }
        if let Some((memory_mib, limits)) = &changes.limits {
            let limits = limits.for_host(*memory_mib, &self.app.config.data_dir)?;
            let id = &self.sandbox.id;
            self.app.launcher.set_limits(id, limits).await?;
        }
        let network = changes.network.is_some() && self.app.net.is_installed();
        let host_port = match &mut changes.port {
            Some(change) => Some(HostPort::bound(&self.sandbox, change).await?),
            None => None,
        };
        let placeholder = {
            let (app, owner) = (Arc::clone(&self.app), self.sandbox.owner());
            move |name: &SecretName| secrets::placeholder(&app, &owner, name)
        };
        let mut placed = Ok(());
        self.save(|record| {
            changes.apply(record);
            placed = record.network.place(placeholder);
        })
        .await?;
        placed?;
        if let Some(host_port) = host_port {
            host_port.settle(&self.sandbox).await;
        }
        if network {
            // The broker is ready before the engine sends connections there.
            self.provide_secrets().await?;
            self.enforce_network().await?;
            self.trust_broker().await?;
        }
        Ok(())
    }

    async fn change(&self, step: Step, command: Command, state: StoredState) -> Result<(), Error> {
        let sandbox = &self.sandbox;
        if sandbox.phase().after(step).is_none() {
            return Err(sandbox.not_running());
        }
        let answer = quickly(self.vmm.run(command, &[])).await;
        if answer.is_err() && step == Step::Pause {
            // The VMM may pause later all the same, and no other request would resume it.
            let _ = quickly(self.vmm.run(Command::Resume, &[])).await;
        }
        answer?.map_err(Error::vmm("the sandbox could not be paused or resumed"))?;
        sandbox.step(step);
        self.save(|record| record.state = state).await?;
        Ok(())
    }

    async fn counters(&self) -> Result<Counters, Error> {
        let reply = quickly(self.vmm.call(Command::Counters, &[]))
            .await?
            .map_err(Error::vmm("the counters could not be read"))?;
        match reply {
            Reply::Counters(counters) => Ok(counters),
            _ => Err(Error::Task),
        }
    }

    /// The VM ended by itself. The record stays, so that users see why, until the sandbox is deleted.
    async fn fail(&self, cause: Ended) {
        let how = describe(cause);
        let sandbox = &self.sandbox;
        tracing::warn!(sandbox = %sandbox.id, how, "the VM ended by itself");
        sandbox.step(Step::Ended);
        sandbox.set_error(ErrorCode::SandboxGone, how.to_owned(), None);
        sandbox.keep_agent(None).await;
        let saved = self
            .save(|record| {
                record.state = StoredState::Failed;
                record.failure = Some(how.to_owned());
            })
            .await;
        if let Err(error) = saved {
            tracing::error!(sandbox = %sandbox.id, error = error.chain(), "the failure is not recorded");
        }
        metrics::counter!("forkd_sandboxes_failed_total").increment(1);
        self.app
            .events
            .tell(EventKind::SandboxFailed, &sandbox.id, Some(how.to_owned()));
    }

    /// Ends the VM. The lease holds its blobs until its process is gone.
    async fn end(self) -> Lease {
        self.sandbox.keep_agent(None).await;
        // Before the VM ends: a daemon that dies now finishes the deletion at its next start.
        let saved = self
            .save(|record| record.state = StoredState::Stopping)
            .await;
        if let Err(error) = saved {
            tracing::error!(sandbox = %self.sandbox.id, error = error.chain(), "the deletion is not recorded");
        }
        let stopped = tokio::time::timeout(STOP, self.vmm.run(Command::Stop, &[])).await;
        if !matches!(stopped, Ok(Ok(()))) {
            tracing::debug!(sandbox = %self.sandbox.id, "the VMM did not confirm its end");
        }
        self.lease
    }
}

impl Changes {
    /// Turns an edit of the network policy into the policy after it.
    fn resolved(mut self, sandbox: &SandboxHandle) -> Result<Self, Error> {
        if let Some(change) = self.network {
            let policy = change.applied(&sandbox.record().network.policy())?;
            self.network = Some(NetworkChange::Replace(policy));
        }
        if let Some(change) = &self.port {
            change.check(&sandbox.record().ports)?;
        }
        Ok(self)
    }

    fn apply(self, record: &mut SandboxRecord) {
        if let Some(expires) = self.expires_at_unix {
            record.expires_at_unix = expires;
        }
        if let Some(labels) = self.labels {
            record.labels = labels;
        }
        if let Some((memory_mib, limits)) = self.limits {
            record.memory_limit_mib = memory_mib;
            record.limits = limits;
        }
        if let Some(NetworkChange::Replace(policy)) = self.network {
            record.network = record.network.next(&policy);
        }
        if let Some(change) = self.port {
            change.apply(&mut record.ports);
        }
    }
}

enum Next {
    Stop,
    Expired,
    Ended,
    Ask(Ask),
    Event(Event),
}

/// Serves a sandbox without a VM until it is deleted or expires: only its record can still be changed.
async fn serve_failed(
    app: &Arc<App>,
    sandbox: &Arc<SandboxHandle>,
    queue: &mut mpsc::Receiver<Ask>,
) {
    loop {
        let remaining = remaining(sandbox);
        tokio::select! {
            biased;
            () = sandbox.stop.cancelled() => return,
            () = sleep_for(remaining) => return,
            ask = queue.recv() => match ask {
                Some(Ask::Update(changes, done)) => {
                    let saved = match changes.resolved(sandbox) {
                        Ok(changes) => {
                            let record = sandbox.update(|record| changes.apply(record));
                            app.db.put_sandboxes(vec![record]).await.map_err(Error::from)
                        }
                        Err(error) => Err(error),
                    };
                    let _ = done.send(saved.map(|()| sandbox.info()));
                }
                Some(ask) => ask.refuse(sandbox),
                None => return,
            },
        }
    }
}

/// How much time the sandbox has left, if that is limited.
fn remaining(sandbox: &SandboxHandle) -> Option<Duration> {
    let expires = sandbox.record().expires_at_unix?;
    Some(Duration::from_secs(expires.saturating_sub(clock::unix())))
}

async fn sleep_for(remaining: Option<Duration>) {
    match remaining {
        Some(remaining) => tokio::time::sleep(remaining).await,
        None => std::future::pending().await,
    }
}

pub(super) async fn quickly<T>(work: impl Future<Output = T>) -> Result<T, Error> {
    tokio::time::timeout(QUICK, work)
        .await
        .map_err(|_| Error::Timeout {
            what: "the VMM's answer".to_owned(),
            seconds: QUICK.as_secs(),
        })
}

fn describe(cause: Ended) -> &'static str {
    match cause {
        Some(StopCause::PowerOff) => "the guest powered off",
        Some(StopCause::Reset) => "the guest asked for a reset",
        Some(StopCause::GuestPanic) => "the guest kernel panicked",
        Some(StopCause::VcpuFailed) => "a virtual CPU could not go on",
        Some(StopCause::Asked) => "the VMM was told to stop",
        None => "the VMM process ended",
    }
}
