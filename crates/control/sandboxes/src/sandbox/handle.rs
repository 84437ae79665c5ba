//! A sandbox as requests see it: its state, its queue, its agent.
//!
//! Only the owner ([`super::owner`]) changes the record and the phase. Requests read them, put work into the queue, or talk to
//! the agent in the guest.

use std::path::PathBuf;
use std::time::Duration;

use forkd_agent_client::{Client, ConnectError, Deadline, Identified, Options};
use forkd_api::{ErrorBody, ErrorCode, NetworkPolicy, SandboxInfo};
use forkd_guest_proto::IdentityRequest;
use forkd_types::SandboxId;
use forkd_vmm_proto::AGENT_PORT;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::owner::{Ask, Changes};
use super::state::{Phase, Step};
use crate::error::{Error, chain};
use crate::ports::Published;
use crate::state::{SandboxRecord, VolumeUse};

/// Where the agent is by convention inside a sandbox's network namespace.
const GUEST_ADDR: &str = "10.42.0.2:8888";
/// How many requests may wait for a sandbox's owner.
const QUEUE: usize = 32;
/// How long a connection to an agent may take.
const CONNECT: Duration = Duration::from_secs(10);

/// The part that changes over a sandbox's life.
#[derive(Debug)]
struct SharedState {
    phase: Phase,
    record: SandboxRecord,
    error: Option<ErrorBody>,
}

/// A sandbox as every task but its owner sees it.
pub struct SandboxHandle {
    pub id: SandboxId,
    /// Asks for its end.
    pub stop: CancellationToken,
    /// Cancelled once nothing of it is left.
    pub gone: CancellationToken,
    /// The console output.
    pub console: PathBuf,
    vsock: PathBuf,
    queue: mpsc::Sender<Ask>,
    live: Mutex<SharedState>,
    /// Repeats the phase for those who wait for it.
    phases: watch::Sender<Phase>,
    agent: tokio::sync::Mutex<Option<Client>>,
    /// Cancelled at the next roll-back.
    era: Mutex<CancellationToken>,
    /// Host ports of the guest's ports; the owner opens and closes them.
    pub published: Published,
}

impl std::fmt::Debug for SandboxHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandbox")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

impl SandboxHandle {
    /// A sandbox whose VM does not run yet, and the queue for its owner.
    pub(super) fn new(
        record: SandboxRecord,
        vsock: PathBuf,
        console: PathBuf,
    ) -> (Self, mpsc::Receiver<Ask>) {
        let (queue, receiver) = mpsc::channel(QUEUE);
        let sandbox = Self {
            id: record.id.clone(),
            stop: CancellationToken::new(),
            gone: CancellationToken::new(),
            console,
            vsock,
            queue,
            live: Mutex::new(SharedState {
                phase: Phase::Launching,
                record,
                error: None,
            }),
            phases: watch::Sender::new(Phase::Launching),
            agent: tokio::sync::Mutex::new(None),
            era: Mutex::default(),
            published: Published::default(),
        };
        (sandbox, receiver)
    }

    fn live(&self) -> MutexGuard<'_, SharedState> {
        self.live.lock()
    }

    /// Where it is.
    pub fn phase(&self) -> Phase {
        self.live().phase
    }

    /// Takes a step; `false` if it cannot be taken.
    pub(super) fn step(&self, step: Step) -> bool {
        let mut live = self.live();
        match live.phase.after(step) {
            Some(next) => {
                live.phase = next;
                self.phases.send_replace(next);
                true
            }
            None => false,
        }
    }

    /// Waits until the sandbox has started, or failed to.
    pub async fn launched(&self) {
        let mut phases = self.phases.subscribe();
        // The sender lives as long as this handle.
        let _ = phases.wait_for(|phase| *phase != Phase::Launching).await;
    }

    /// Why the sandbox failed.
    pub fn failure(&self) -> Option<Error> {
        self.live().error.clone().map(|body| Error::Refused {
            code: body.code,
            message: body.error,
            hint: body.hint,
        })
    }

    /// A copy of the stored record.
    pub fn record(&self) -> SandboxRecord {
        self.live().record.clone()
    }

    /// The owner in the sense of tokens: who asked for it.
    pub fn owner(&self) -> String {
        self.live().record.owner.clone()
    }

    /// Changes the record. Only the owner task does, and it makes the change durable.
    pub(super) fn update(&self, change: impl FnOnce(&mut SandboxRecord)) -> SandboxRecord {
        let mut live = self.live();
        change(&mut live.record);
        live.record.clone()
    }

    /// Notes why it failed.
    pub(super) fn set_error(&self, code: ErrorCode, error: String, hint: Option<String>) {
        self.live().error = Some(ErrorBody {
            error,
            code,
            hint,
            request_id: None,
        });
    }

    /// As the API shows it.
    pub fn info(&self) -> SandboxInfo {
        let live = self.live();
        let record = &live.record;
        SandboxInfo {
            id: record.id.to_string(),
            snapshot_tag: record.tag.to_string(),
            netns: record.netns.clone(),
            guest_addr: GUEST_ADDR.to_owned(),
            created_at_unix: record.created_at_unix,
            pid: record.pid.filter(|_| live.phase != Phase::Failed),
            memory_limit_mib: record.memory_limit_mib,
            limits: record.limits.as_shown(record.memory_limit_mib),
            network: NetworkPolicy::from(&record.network.policy()),
            has_branched: record.branch_count > 0,
            last_branch_memory_path: record.last_branch_memory_path.clone(),
            branch_count: record.branch_count,
            state: live.phase.into(),
            error: live.error.clone(),
            expires_at_unix: record.expires_at_unix,
            ready_us: record.ready_us,
            memory_mib: record.memory_mib,
            vcpus: record.vcpus,
            hostname: record.hostname.clone(),
            workspace: record.workspace.clone(),
            labels: record.labels.clone(),
            metadata: record.metadata.clone(),
            owner: record.owner.clone(),
            volumes: record.volumes.iter().map(VolumeUse::shown).collect(),
        }
    }

    /// Puts a request into the owner's queue.
    pub fn ask(&self, ask: Ask) -> Result<(), Error> {
        use mpsc::error::TrySendError;
        self.queue.try_send(ask).map_err(|error| match error {
            TrySendError::Full(_) => Error::hinted(
                ErrorCode::Busy,
                format!("sandbox {} has {QUEUE} requests waiting", self.id),
                "try again in a moment",
            ),
            TrySendError::Closed(_) => self.not_running(),
        })
    }

    /// Puts a request into the owner's queue and waits for the answer. The owner carries the request out even if the
    /// caller stops waiting.
    pub async fn answer<T>(
        &self,
        ask: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> Ask,
    ) -> Result<T, Error> {
        let (reply, answer) = oneshot::channel();
        self.ask(ask(reply))?;
        answer.await.map_err(|_| self.not_running())?
    }

    /// Changes what users may set. The change is durable and in force when this returns.
    pub async fn change(&self, changes: Changes) -> Result<SandboxInfo, Error> {
        self.answer(|reply| Ask::Update(Box::new(changes), reply))
            .await
    }

    /// Why it cannot be used in the phase it is in.
    pub fn not_running(&self) -> Error {
        let live = self.live();
        match live.phase {
            Phase::Failed | Phase::Stopping => Error::Gone {
                id: self.id.clone(),
                how: live
                    .error
                    .as_ref()
                    .map_or_else(|| live.phase.as_str().to_owned(), |body| body.error.clone()),
            },
            Phase::Launching => Error::hinted(
                ErrorCode::AgentUnreachable,
                format!("sandbox {} is still starting", self.id),
                "try again in a moment",
            ),
            phase => Error::refused(
                ErrorCode::WrongState,
                format!("sandbox {} is {}", self.id, phase.as_str()),
            ),
        }
    }

    /// A connection to its agent, shared by all requests.
    pub async fn agent(&self) -> Result<Client, Error> {
        if !self.phase().answers() {
            return Err(self.not_running());
        }
        let mut slot = self.agent.lock().await;
        if let Some(client) = slot.as_ref().filter(|client| !client.is_closed()) {
            return Ok(client.clone());
        }
        let client = tokio::select! {
            client = self.connect(CONNECT) => client.map_err(|error| self.unreachable(&error))?,
            () = self.stop.cancelled() => return Err(self.not_running()),
        };
        *slot = Some(client.clone());
        Ok(client)
    }

    /// Connects to the agent, whatever the phase.
    pub async fn connect(&self, timeout: Duration) -> Result<Client, ConnectError> {
        Client::connect_vsock(&self.vsock, AGENT_PORT, agent_options(timeout)).await
    }

    /// Connects to the agent of a guest that was just started, and gives the guest an identity in the same exchange.
    pub async fn wake(
        &self,
        timeout: Duration,
        request: IdentityRequest,
        deadline: Deadline,
    ) -> Result<(Client, Result<Identified, forkd_agent_client::Error>), ConnectError> {
        let options = agent_options(timeout);
        Client::wake_vsock(&self.vsock, AGENT_PORT, options, request, deadline).await
    }

    /// A token of the present era: it is cancelled when the sandbox is rolled back.
    pub fn era(&self) -> CancellationToken {
        self.era.lock().clone()
    }

    /// Breaks every connection to a port of the guest, because the guest went back.
    pub(super) fn end_era(&self) {
        let mut era = self.era.lock();
        std::mem::take(&mut *era).cancel();
    }

    /// Keeps a connection for later requests, or forgets the one there is.
    pub async fn keep_agent(&self, client: Option<Client>) {
        *self.agent.lock().await = client;
    }

    /// The agent could not be reached.
    pub fn unreachable(&self, error: &ConnectError) -> Error {
        Error::hinted(
            ErrorCode::AgentUnreachable,
            format!(
                "the agent of sandbox {} does not answer: {}",
                self.id,
                chain(error)
            ),
            format!("the console may say why: forkd logs {}", self.id),
        )
    }
}

fn agent_options(timeout: Duration) -> Options {
    Options {
        timeout,
        program: concat!("forkd-controller ", env!("CARGO_PKG_VERSION")).to_owned(),
        budget: crate::agent_limits::BUDGET.clone(),
        ..Options::default()
    }
}
