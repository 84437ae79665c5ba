//! [`Session`]: a connection to the agent in a running machine.
//!
//! A session runs commands and copies files. Several requests may run at the same time.

mod copy;
mod daemon;
mod sync;

use std::future::Future;
use std::time::Duration;

use forkd_agent_client::{Calls, Captured, Client, ConnectError, Error, Exec, Options};
use forkd_guest_proto::{ExecRequest, ProcessId, ShutdownMode, ShutdownRequest};

use crate::error::MachineError;
use crate::machine::Machine;
use crate::seed;
use crate::transfer::Transfer;

const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// How long one request may take. Some install programs in the machine.
const REQUEST: Duration = Duration::from_secs(3600);

/// A connection to a machine. Several requests may run at the same time.
#[derive(Clone)]
pub struct Session {
    client: Calls,
    /// Missing in conversations that copy nothing.
    transfer: Option<Transfer>,
}

impl Machine {
    /// Connects to the running machine.
    pub async fn connect(&self) -> Result<Session, MachineError> {
        let record = self.running()?;
        let token = seed::read_token(&self.layout.token())?;
        match Session::open(record.agent_port, &token, CONNECT_LIMIT).await {
            Ok(mut session) => {
                session.transfer = Some(Transfer::of(&self.layout));
                Ok(session)
            }
            Err(_) if self.is_paused() => Err(MachineError::PausedNoSpace {
                name: self.name.to_string(),
            }),
            Err(source) => Err(MachineError::Agent {
                action: format!("reach the agent of machine {}", self.name),
                source: Box::new(source),
            }),
        }
    }
}

impl Session {
    pub(crate) async fn open(
        port: u16,
        token: &str,
        limit: Duration,
    ) -> Result<Self, ConnectError> {
        let options = Options {
            token: Some(token.to_owned()),
            timeout: limit,
            program: concat!("forkd ", env!("CARGO_PKG_VERSION")).to_owned(),
            ..Options::default()
        };
        let client = Client::connect_tcp(&format!("127.0.0.1:{port}"), options).await?;
        Ok(Self {
            client: client.each_within(REQUEST),
            transfer: None,
        })
    }

    /// The calls underneath, for everything else the agent can do.
    #[must_use]
    pub fn client(&self) -> &Calls {
        &self.client
    }

    /// Starts a command and returns a handle. Dropping the handle ends the command.
    pub async fn exec(&self, request: ExecRequest) -> Result<Exec, MachineError> {
        let what = request
            .argv
            .first()
            .cloned()
            .or_else(|| request.shell.clone());
        self.client
            .exec(request)
            .await
            .map_err(agent_error(format!("run {}", what.unwrap_or_default())))
    }

    /// Runs a command to its end and returns its output.
    pub async fn run<S: AsRef<str>>(&self, argv: &[S]) -> Result<Captured, MachineError> {
        let argv: Vec<String> = argv.iter().map(|word| word.as_ref().to_owned()).collect();
        let action = format!("run {}", argv.join(" "));
        let request = ExecRequest {
            argv,
            ..Default::default()
        };
        self.client
            .exec_capture(request)
            .await
            .map_err(agent_error(action))
    }

    /// Sends a signal to a process and its descendants.
    pub async fn signal(&self, process: ProcessId, signal: i32) -> Result<(), MachineError> {
        self.client
            .signal(process, signal, true)
            .await
            .map_err(agent_error(format!("send signal {signal}")))
    }

    /// Asks the machine to power off. Returns `false` if the agent refuses or does not answer.
    pub(crate) async fn power_off(&self, limit: Duration) -> bool {
        let request = ShutdownRequest {
            mode: ShutdownMode::Poweroff,
            grace_ms: None,
        };
        match within(limit, self.client.shutdown(request)).await {
            // It may be gone before its answer is.
            Some(Ok(()) | Err(Error::Closed { .. })) => true,
            Some(Err(_)) | None => false,
        }
    }

    /// The release of the machine's kernel.
    pub(crate) async fn kernel(&self, limit: Duration) -> Option<String> {
        within(limit, self.client.ping())
            .await?
            .ok()
            .map(|pong| pong.kernel)
    }
}

async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(limit, future).await.ok()
}

pub(crate) fn agent_error<E>(action: impl Into<String>) -> impl FnOnce(E) -> MachineError
where
    E: std::error::Error + Send + Sync + 'static,
{
    let action = action.into();
    move |source| MachineError::Agent {
        action,
        source: Box::new(source),
    }
}
