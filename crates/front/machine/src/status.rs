//! The state of a machine as `forkd machine status` shows it.
//!
//! [`Status`] combines the record, QEMU's own state, and the agent's answer within a short timeout.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::accel::Accel;
use crate::clock::Clock;
use crate::error::MachineError;
use crate::machine::Machine;
use crate::qmp::Qmp;
use crate::record::Record;
use crate::seed;
use crate::session::Session;
use crate::start::unix_ms;

const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// The state of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The machine does not exist.
    Absent,
    /// The machine does not run; its data disk is kept.
    Stopped,
    /// QEMU runs, the agent has not answered yet.
    Starting,
    /// The machine runs and answers.
    Running,
    /// The machine has answered before, but does not now.
    Unresponsive,
    /// The machine stands still because the host's disk is full.
    Paused,
}

impl State {
    /// The name in the JSON output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Stopped => "stopped",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Unresponsive => "unresponsive",
            Self::Paused => "paused",
        }
    }
}

/// The output of `forkd machine status`.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    pub name: String,
    pub state: State,
    /// The directory with the machine's files.
    pub folder: PathBuf,
    /// Path of the console log.
    pub console: PathBuf,
    /// Space that the data disk uses on the host.
    pub disk_used_mib: u64,
    /// Details of the running machine. `None` if it does not run.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunStatus>,
}

/// Details of a running machine.
#[derive(Debug, Clone, Serialize)]
pub struct RunStatus {
    pub accel: Accel,
    /// Why this acceleration was chosen.
    pub accel_reason: String,
    /// A sentence for users about the speed.
    pub expectation: &'static str,
    pub clock: Clock,
    pub cpus: u32,
    pub memory_mib: u32,
    pub disk_mib: u32,
    /// Port of 127.0.0.1 for the daemon in the machine.
    pub port: u16,
    /// Port of 127.0.0.1 for the agent in the machine.
    pub agent_port: u16,
    pub pid: i32,
    pub qemu: String,
    pub image: String,
    /// Seconds since the start of QEMU.
    pub uptime_s: u64,
    /// Milliseconds from the start of QEMU to the first answer.
    pub boot_ms: Option<u64>,
    /// Release of the machine's kernel, if the machine answers.
    pub kernel: Option<String>,
    /// Whether the daemon in the machine runs, if the machine answers.
    pub daemon: Option<bool>,
}

impl Machine {
    /// Port of 127.0.0.1 for the daemon in the machine. `None` if the machine does not run.
    #[must_use]
    pub fn daemon_port(&self) -> Option<u16> {
        self.live_record().ok()?.map(|record| record.api_port)
    }

    /// Collects the state of the machine.
    pub async fn status(&self) -> Result<Status, MachineError> {
        let root = self.layout.root();
        let (state, run) = match self.live_record()? {
            Some(record) => {
                let (state, run) = self.run_status(&record).await;
                (state, Some(run))
            }
            None if root.exists() => (State::Stopped, None),
            None => (State::Absent, None),
        };
        Ok(Status {
            name: self.name.to_string(),
            state,
            folder: root.to_owned(),
            console: self.layout.console(),
            disk_used_mib: fs::metadata(self.layout.data_disk())
                .map_or(0, |disk| disk.blocks() * 512 / (1024 * 1024)),
            run,
        })
    }

    async fn run_status(&self, record: &Record) -> (State, RunStatus) {
        let mut run = RunStatus {
            accel: record.accel,
            accel_reason: record.accel_reason.clone(),
            expectation: record.accel.expectation(),
            clock: record.clock,
            cpus: record.cpus,
            memory_mib: record.memory.0,
            disk_mib: record.disk.0,
            port: record.api_port,
            agent_port: record.agent_port,
            pid: record.qemu.pid,
            qemu: record.qemu_version.clone(),
            image: record.image.clone(),
            uptime_s: unix_ms().saturating_sub(record.started_unix_ms) / 1000,
            boot_ms: record.boot_ms,
            kernel: None,
            daemon: None,
        };
        if self.is_paused() {
            return (State::Paused, run);
        }
        match self.ask(record).await {
            Some((kernel, daemon)) => {
                run.kernel = Some(kernel);
                run.daemon = daemon;
                (State::Running, run)
            }
            None if record.boot_ms.is_none() => (State::Starting, run),
            None => (State::Unresponsive, run),
        }
    }

    pub(crate) fn is_paused(&self) -> bool {
        Qmp::connect(&self.layout.qmp())
            .and_then(|mut qmp| {
                qmp.status().map_err(|source| MachineError::Qmp {
                    path: self.layout.qmp(),
                    source,
                })
            })
            .is_ok_and(|status| status != "running")
    }

    async fn ask(&self, record: &Record) -> Option<(String, Option<bool>)> {
        let token = seed::read_token(&self.layout.token()).ok()?;
        let session = Session::open(record.agent_port, &token, ANSWER_LIMIT)
            .await
            .ok()?;
        let kernel = session.kernel(ANSWER_LIMIT).await?;
        Some((kernel, session.daemon_runs(ANSWER_LIMIT).await))
    }
}
