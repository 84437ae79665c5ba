//! Services: programs that the agent starts, supervises, and keeps across forks.

use serde::{Deserialize, Serialize};

use crate::{ExitStatus, ProcessId};

/// Starts a service. The response comes when every condition of `ready` holds; a service that ends before, or that is
/// not ready in time, is an error with the end of its output, and is stopped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServiceStart {
    /// One of a kind in the guest.
    pub name: String,
    pub argv: Vec<String>,
    /// Variables beside those of the image; `None` removes one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<(String, Option<String>)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    pub restart: Restart,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ready: Vec<Readiness>,
    /// How long it may take to become ready; two minutes when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

/// When the agent starts a service again that has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Restart {
    Never,
    /// If it ended with a signal or with an exit code other than 0.
    #[default]
    OnFailure,
    Always,
}

/// A condition of readiness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Readiness {
    /// This TCP port accepts a connection on the loopback address.
    Port(u16),
    /// This file exists.
    File(String),
    /// This command ends with exit code 0. It runs as the user of the service.
    Exec(Vec<String>),
    /// A line of the output of the service contains this text.
    Log(String),
}

/// A service of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceInfo {
    pub name: String,
    pub state: ServiceState,
    /// The process that runs now, or the last one.
    #[serde(default)]
    pub process: ProcessId,
    /// How often the agent started it again.
    #[serde(default)]
    pub restarts: u32,
    /// How the last process ended, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_end: Option<ExitStatus>,
}

/// State of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServiceState {
    /// A condition of readiness does not hold yet.
    Starting,
    Ready,
    /// It ended, and the agent is about to start it again.
    Restarting,
    /// It ended, and stays so.
    Ended,
}

/// Waits until the guest is calm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SettleRequest {
    /// The largest share of processor time of a calm guest, in percent of all processors.
    pub busy_percent: u8,
    /// How long it has to be calm.
    pub for_ms: u64,
    /// How long to wait.
    pub timeout_ms: u64,
}

impl Default for SettleRequest {
    fn default() -> Self {
        Self {
            busy_percent: 5,
            for_ms: 200,
            timeout_ms: 10_000,
        }
    }
}

/// Whether the guest became calm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SettleReport {
    pub calm: bool,
    /// Processor time in the last window, in percent of all processors.
    pub busy_percent: u8,
    pub took_ms: u64,
}
