//! The sandbox in which the steps of a stage run.
//!
//! It is an ordinary sandbox of the owner. Dropping the [`Machine`] ends it, unless it was [kept](Machine::keep).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use forkd_agent_client::{Calls, Deadline, Output};
use forkd_api::{BuildEvent, ErrorCode};
use forkd_guest_proto::{
    ExecRequest, ExecResult, FileInfo, MkdirRequest, OnDisconnect, QuiesceRequest, RemoveRequest,
};
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::app::App;
use forkd_sandboxes::clock;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::host_limits::HostLimits;
use forkd_sandboxes::ops::branch::{Branch, branch};
use forkd_sandboxes::ops::spawn::{CreateRequest, ready, start};
use forkd_sandboxes::sandbox::{Changes, CutMode, NetworkChange, SandboxHandle};
use forkd_sandboxes::state::{OnExpiry, PortsRecord};
use forkd_types::{Policy, Tag};

use crate::LONGEST;
use crate::events::Events;

/// How long the sandbox of a failed step stays, in seconds.
const KEPT: u64 = 3600;
/// The label of sandboxes in which steps run. Its value is the name of the image.
const LABEL: &str = "forkd.build-step";
/// The label of sandboxes that were kept.
const FAILED: &str = "forkd.failed-build";
/// Bytes of output that a step may print before the rest is left out.
const MAX_OUTPUT: usize = 16 << 20;
/// How long the guest may take to write to its disk before a cut.
const SYNC: Duration = Duration::from_secs(300);

/// A sandbox of a build.
#[derive(Debug)]
pub struct Machine {
    app: Arc<App>,
    sandbox: Arc<SandboxHandle>,
    kept: bool,
}

impl Drop for Machine {
    fn drop(&mut self) {
        if !self.kept {
            self.sandbox.stop.cancel();
        }
    }
}

impl Machine {
    /// Starts a sandbox from the state of a step.
    pub async fn start(
        app: &Arc<App>,
        tag: &Tag,
        owner: &str,
        network: Policy,
        label: &str,
    ) -> Result<Self, Error> {
        let request = CreateRequest {
            tag: tag.clone(),
            count: 1,
            owner: owner.to_owned(),
            // A daemon that dies meanwhile leaves the sandbox to its successor.
            expires_at_unix: Some(clock::unix() + LONGEST.as_secs() + KEPT),
            on_expiry: OnExpiry::Delete,
            memory_limit_mib: None,
            limits: HostLimits::default(),
            network,
            labels: BTreeMap::from([(LABEL.to_owned(), label.to_owned())]),
            env: BTreeMap::new(),
            metadata: BTreeMap::new(),
            ports: PortsRecord::default(),
            per_child_netns: false,
            volumes: Vec::new(),
            workspace: None,
            id: None,
        };
        let children = start(app, request).await?;
        let sandbox = children.first().cloned().ok_or(Error::Task)?;
        // From now on the sandbox ends with this value.
        let machine = Self {
            app: Arc::clone(app),
            sandbox,
            kept: false,
        };
        ready(&children).await?;
        Ok(machine)
    }

    pub fn id(&self) -> String {
        self.sandbox.id.to_string()
    }

    /// Requests that the agent carries out by itself.
    pub async fn calls(&self) -> Result<Calls, Error> {
        Ok(self.sandbox.agent().await?.by(agent_limits::answer()))
    }

    /// Requests that may take long.
    pub async fn slow_calls(&self) -> Result<Calls, Error> {
        Ok(self.sandbox.agent().await?.by(Deadline::within(SYNC)))
    }

    /// Runs a command to its end and tells its output.
    pub async fn run(&self, events: &Events, request: ExecRequest) -> Result<ExecResult, Error> {
        let lost = || Error::agent("the command of the step was lost");
        let request = ExecRequest {
            timeout_ms: Some(u64::try_from(LONGEST.as_millis()).unwrap_or(u64::MAX)),
            on_disconnect: OnDisconnect::Kill,
            ..request
        };
        let client = self.sandbox.agent().await?;
        let mut exec = client
            .by(agent_limits::start())
            .exec(request)
            .await
            .map_err(Error::agent("the command of the step cannot be run"))?;
        let mut told = 0;
        while let Some(output) = exec.next_output().await.map_err(lost())? {
            let (stderr, bytes) = match output {
                Output::Stdout(bytes) => (false, bytes),
                Output::Stderr(bytes) => (true, bytes),
                Output::Lost { .. } => continue,
            };
            if told > MAX_OUTPUT {
                continue;
            }
            told += bytes.len();
            let text = String::from_utf8_lossy(&bytes).into_owned();
            events.tell(BuildEvent::Output { stderr, text }).await?;
            if told > MAX_OUTPUT {
                let limit = MAX_OUTPUT >> 20;
                events
                    .note(format!(
                        "more than {limit} MiB of output: the rest is left out"
                    ))
                    .await?;
            }
        }
        exec.wait().await.map_err(lost())
    }

    /// Ends every process that a step left behind.
    pub async fn end_processes(&self) -> Result<(), Error> {
        self.calls()
            .await?
            .kill_all()
            .await
            .map_err(Error::agent("processes of the step could not be ended"))
    }

    pub async fn make_folder(&self, path: &str) -> Result<(), Error> {
        self.calls()
            .await?
            .mkdir(MkdirRequest {
                path: path.to_owned(),
                parents: true,
                ..MkdirRequest::default()
            })
            .await
            .map_err(Error::agent(format!("{path} cannot be made in the guest")))
    }

    pub async fn remove(&self, path: &str) -> Result<(), Error> {
        self.slow_calls()
            .await?
            .remove(RemoveRequest {
                path: path.to_owned(),
                recursive: true,
                missing_ok: true,
            })
            .await
            .map_err(Error::agent(format!(
                "{path} cannot be removed in the guest"
            )))
    }

    /// The attributes of a path; none if there is nothing.
    pub async fn stat(&self, path: &str) -> Result<Option<FileInfo>, Error> {
        use forkd_agent_client::Error as Client;
        use forkd_guest_proto::ErrorCode as Guest;
        match self.calls().await?.stat(path).await {
            Ok(info) => Ok(Some(info)),
            Err(Client::Agent(error))
                if matches!(error.code, Guest::NotFound | Guest::NotDirectory) =>
            {
                Ok(None)
            }
            Err(error) => Err(Error::agent(format!("{path} cannot be read in the guest"))(
                error,
            )),
        }
    }

    /// Freezes the state under a tag; the sandbox goes on.
    pub async fn cut(&self, tag: &Tag) -> Result<(), Error> {
        self.slow_calls()
            .await?
            .quiesce(QuiesceRequest::default())
            .await
            .map_err(Error::agent("the guest could not be prepared for the cut"))?;
        let request = Branch {
            tag: Some(tag.clone()),
            mode: CutMode::Diff,
            wait: true,
            parent: None,
            freeze: false,
        };
        match branch(&self.app, &self.sandbox.id, request).await {
            // Another build has made the same state meanwhile.
            Err(error) if error.code() == ErrorCode::AlreadyExists => Ok(()),
            other => other.map(drop),
        }
    }

    /// Changes the network policy.
    pub async fn set_network(&self, policy: Policy) -> Result<(), Error> {
        let changes = Changes {
            network: Some(NetworkChange::Replace(policy)),
            ..Changes::default()
        };
        self.sandbox.change(changes).await.map(drop)
    }

    /// Lets the sandbox live on for an hour, for people to enter. Returns its ID.
    pub async fn keep(mut self) -> Result<String, Error> {
        let mut labels = self.sandbox.record().labels;
        if let Some(name) = labels.remove(LABEL) {
            labels.insert(FAILED.to_owned(), name);
        }
        let changes = Changes {
            expires_at_unix: Some(Some(clock::unix() + KEPT)),
            labels: Some(labels),
            ..Changes::default()
        };
        self.sandbox.change(changes).await?;
        self.kept = true;
        Ok(self.id())
    }

    /// Ends the sandbox and waits until nothing of it is left.
    pub async fn end(self) {
        self.sandbox.stop.cancel();
        self.sandbox.gone.cancelled().await;
    }
}

/// Ends the sandboxes of builds that an earlier daemon did not finish. Called once, before the first build.
pub fn end_orphans(app: &App) {
    for sandbox in app.sandboxes.list() {
        if sandbox.record().labels.contains_key(LABEL) {
            tracing::info!(sandbox = %sandbox.id, "ending the sandbox of an unfinished build");
            sandbox.stop.cancel();
        }
    }
}
