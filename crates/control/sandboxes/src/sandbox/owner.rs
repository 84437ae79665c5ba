//! The task that owns a sandbox.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::{ErrorCode, EventKind};
use forkd_store::Lease;
use forkd_vmm_link::{Vmm, VmmCallError, VmmEvents};
use forkd_vmm_proto::{Capability, Command, Counters, Event, Reply, StopCause};
use tokio::sync::{mpsc, oneshot};

use super::branch::{self, BranchAsk};
use super::checkpoint::{self, CheckpointAsk};
use super::handle::Sandbox;
use super::state::Step;
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::state::StoredState;

/// How long a VMM may take to end when asked.
const STOP: Duration = Duration::from_secs(2);
/// How long a VMM may take to pause, resume or count.
const QUICK: Duration = Duration::from_secs(10);

/// How often the time of a sandbox that has ended is looked at.
const LOOK: Duration = Duration::from_secs(10);

/// What can be asked of a sandbox's owner.
#[derive(Debug)]
pub enum Ask {
    /// Cut it.
    Branch(Box<BranchAsk>),
    /// Keep a point to go back to, or go back.
    Checkpoint(Box<CheckpointAsk>),
    /// Stop its vCPUs.
    Pause(oneshot::Sender<Result<(), Error>>),
    /// Let them go on.
    Resume(oneshot::Sender<Result<(), Error>>),
    /// What the VMM counted.
    Counters(oneshot::Sender<Result<Counters, Error>>),
    /// Look again at when it expires.
    Rescheduled,
}

impl Ask {
    /// Tells whoever waits that there is no VM any more. Nobody may be waiting.
    fn refuse(self, sandbox: &Sandbox) {
        match self {
            Self::Branch(ask) => drop(ask.done.send(Err(sandbox.not_running()))),
            Self::Checkpoint(ask) => ask.refuse(sandbox.not_running()),
            Self::Pause(done) | Self::Resume(done) => drop(done.send(Err(sandbox.not_running()))),
            Self::Counters(done) => drop(done.send(Err(sandbox.not_running()))),
            Self::Rescheduled => {}
        }
    }
}

/// What only the owner has.
pub struct Owned {
    /// The daemon.
    pub app: Arc<App>,
    /// The shared part.
    pub sandbox: Arc<Sandbox>,
    /// The control socket.
    pub vmm: Vmm,
    /// What the VMM says unasked.
    pub events: VmmEvents,
    /// Keeps the blobs it uses.
    pub lease: Lease,
}

/// How the VM ended, as far as it said.
pub(super) type Ended = Option<StopCause>;

impl Owned {
    /// Refuses an operation that the engine of this VM does not have.
    pub(super) fn require(&self, capability: Capability) -> Result<(), Error> {
        if self.vmm.capabilities().contains(capability) {
            return Ok(());
        }
        let engine = self.sandbox.record().engine;
        Err(Error::refused(
            ErrorCode::Unsupported,
            format!(
                "sandbox {} runs on the engine {engine}, which lacks {capability}",
                self.sandbox.id
            ),
        ))
    }

    /// Asks the VMM, and notices its end.
    pub(super) async fn call(
        &mut self,
        ended: &mut Option<Ended>,
        command: Command,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Reply, Error> {
        self.call_noting(ended, command, fds, |_| {})
            .await?
            .map_err(Error::vmm("the VMM did not do it"))
    }

    /// The same for who wants to know what happens meanwhile. What the VMM refuses is for the caller to name.
    pub(super) async fn call_noting(
        &mut self,
        ended: &mut Option<Ended>,
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
                // What happened before the answer is noted before the answer is believed.
                biased;
                event = self.events.next() => match event.map(|event| event.event) {
                    Some(Event::Stopped { cause: found }) => cause = Some(found),
                    Some(event) => note(event),
                    None => {
                        *ended = Some(cause);
                        return Err(gone("the VM ended"));
                    }
                },
                reply = &mut call => return Ok(reply),
                () = self.sandbox.stop.cancelled() => return Err(gone("it was deleted")),
            }
        }
    }
}

enum Next {
    Stop,
    Expired,
    Ended(Ended),
    Ask(Ask),
    Event(Event),
}

/// Serves a sandbox until it is gone.
pub async fn drive(mut owned: Owned, mut queue: mpsc::Receiver<Ask>) {
    let mut cause = None;
    loop {
        match next(&mut owned, &mut queue, cause).await {
            Next::Event(event) => cause = note(&owned, event).or(cause),
            Next::Ask(ask) => {
                if let Err(ended) = answer(&mut owned, ask).await {
                    cause = ended.or(cause);
                }
            }
            Next::Stop => break,
            Next::Expired => {
                tracing::info!(sandbox = %owned.sandbox.id, "its time is over");
                break;
            }
            Next::Ended(cause) => {
                fail(&owned, cause).await;
                queue.close();
                while let Ok(ask) = queue.try_recv() {
                    ask.refuse(&owned.sandbox);
                }
                until_removed(&owned.sandbox).await;
                break;
            }
        }
    }
    owned.sandbox.step(Step::Stop);
    queue.close();
    end(owned).await;
}

/// How much time the sandbox has left, if that is limited.
fn remaining(sandbox: &Sandbox) -> Option<Duration> {
    let expires = sandbox.record().expires_at_unix?;
    Some(Duration::from_secs(expires.saturating_sub(clock::unix())))
}

/// Waits until a sandbox whose VM has ended is deleted, or its time is over. It hears no requests any more, so a new
/// time is noticed by looking.
pub(super) async fn until_removed(sandbox: &Sandbox) {
    loop {
        let left = remaining(sandbox).unwrap_or(LOOK).min(LOOK);
        if left.is_zero() {
            return;
        }
        tokio::select! {
            () = sandbox.stop.cancelled() => return,
            () = tokio::time::sleep(left) => {}
        }
    }
}

async fn next(owned: &mut Owned, queue: &mut mpsc::Receiver<Ask>, cause: Ended) -> Next {
    let remaining = remaining(&owned.sandbox);
    // A guest that makes events without end must not live for ever by it.
    if remaining.is_some_and(|left| left.is_zero()) {
        return Next::Expired;
    }
    tokio::select! {
        biased;
        () = owned.sandbox.stop.cancelled() => Next::Stop,
        event = owned.events.next() => match event {
            Some(event) => Next::Event(event.event),
            None => Next::Ended(cause),
        },
        () = tokio::time::sleep(remaining.unwrap_or(Duration::MAX)), if remaining.is_some() => Next::Expired,
        ask = queue.recv() => match ask {
            Some(ask) => Next::Ask(ask),
            None => Next::Stop,
        },
    }
}

fn note(owned: &Owned, event: Event) -> Ended {
    match event {
        Event::Stopped { cause } => return Some(cause),
        Event::DeviceFailed { device, reason } => {
            metrics::counter!("forkd_device_errors_total").increment(1);
            tracing::warn!(sandbox = %owned.sandbox.id, ?device, reason, "device failed");
        }
        Event::AgentReady | Event::CutTaken { .. } | Event::VsockConnect { .. } => {}
    }
    None
}

/// Carries a request out. An error is the end of the VM.
async fn answer(owned: &mut Owned, ask: Ask) -> Result<(), Ended> {
    match ask {
        Ask::Branch(ask) => return branch::serve(owned, *ask).await,
        Ask::Checkpoint(ask) => return checkpoint::serve(owned, *ask).await,
        Ask::Pause(reply) => {
            let result = change(owned, Step::Pause, Command::Pause, StoredState::Paused).await;
            let _ = reply.send(result);
        }
        Ask::Resume(reply) => {
            let result = change(owned, Step::Resume, Command::Resume, StoredState::Running).await;
            let _ = reply.send(result);
        }
        Ask::Counters(reply) => {
            let _ = reply.send(counters(owned).await);
        }
        Ask::Rescheduled => {}
    }
    Ok(())
}

async fn change(
    owned: &Owned,
    step: Step,
    command: Command,
    state: StoredState,
) -> Result<(), Error> {
    let sandbox = &owned.sandbox;
    if sandbox.phase().after(step).is_none() {
        return Err(sandbox.not_running());
    }
    let answer = quickly(owned.vmm.run(command, &[]), "the VMM's answer").await;
    if answer.is_err() && step == Step::Pause {
        // It may pause all the same, later; nobody would ever resume it.
        let _ = quickly(owned.vmm.run(Command::Resume, &[]), "the VMM's answer").await;
    }
    answer?.map_err(Error::vmm("the sandbox could not be paused or resumed"))?;
    sandbox.step(step);
    let record = sandbox.update(|record| record.state = state);
    owned.app.db.put_sandboxes(vec![record]).await?;
    Ok(())
}

async fn counters(owned: &Owned) -> Result<Counters, Error> {
    let reply = quickly(owned.vmm.call(Command::Counters, &[]), "the VMM's answer")
        .await?
        .map_err(Error::vmm("the counters could not be read"))?;
    match reply {
        Reply::Counters(counters) => Ok(counters),
        _ => Err(Error::Task),
    }
}

async fn quickly<T>(work: impl Future<Output = T>, what: &str) -> Result<T, Error> {
    tokio::time::timeout(QUICK, work)
        .await
        .map_err(|_| Error::Timeout {
            what: what.to_owned(),
            seconds: QUICK.as_secs(),
        })
}

/// The VM ended by itself: what it held is given back, its record stays for people to see.
async fn fail(owned: &Owned, cause: Ended) {
    let how = describe(cause);
    let sandbox = &owned.sandbox;
    tracing::warn!(sandbox = %sandbox.id, how, "the VM ended by itself");
    sandbox.step(Step::Ended);
    sandbox.set_error(ErrorCode::SandboxGone, how.to_owned());
    sandbox.keep_agent(None).await;
    let record = sandbox.update(|record| {
        record.state = StoredState::Failed;
        record.failure = Some(how.to_owned());
    });
    owned.app.write_down(record).await;
    metrics::counter!("forkd_sandboxes_failed_total").increment(1);
    owned
        .app
        .events
        .tell(EventKind::SandboxFailed, &sandbox.id, Some(how.to_owned()));
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

/// Ends the VM and removes everything of the sandbox.
async fn end(owned: Owned) {
    let Owned {
        app,
        sandbox,
        vmm,
        lease,
        ..
    } = owned;
    sandbox.keep_agent(None).await;
    // Before anything ends: a daemon that dies now leaves no half of it.
    let record = sandbox.update(|record| record.state = StoredState::Stopping);
    app.write_down(record).await;
    let polite = tokio::time::timeout(STOP, vmm.run(Command::Stop, &[])).await;
    if !matches!(polite, Ok(Ok(()))) {
        tracing::debug!(sandbox = %sandbox.id, "the VMM did not say good-bye");
    }
    drop(vmm);
    app.forget(&sandbox, lease).await;
}
