//! Running things in a sandbox.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /v1/sandboxes/{id}/exec` and `…/exec/stream`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecRequest {
    /// Program and arguments.
    #[schema(min_items = 1, max_items = 4096)]
    pub args: Vec<String>,
    /// Seconds after which it is killed.
    #[serde(default = "default_timeout")]
    #[schema(default = 30, minimum = 1, maximum = 86400)]
    pub timeout_secs: u64,
    /// Environment, over that of the agent *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User to run as *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// What the program reads *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
}

impl Default for ExecRequest {
    fn default() -> Self {
        Self {
            args: Vec::new(),
            timeout_secs: default_timeout(),
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            stdin: None,
        }
    }
}

fn default_timeout() -> u64 {
    30
}

/// Answer of `POST /v1/sandboxes/{id}/exec`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecResponse {
    /// What it wrote; bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// What it wrote to the other stream.
    pub stderr: String,
    /// Its exit code; negative is the signal that ended it.
    pub exit_code: i64,
    /// It was killed because its time was up *(extension)*.
    #[serde(default)]
    pub timed_out: bool,
    /// Output was cut off because it was too long *(extension)*.
    #[serde(default)]
    pub truncated: bool,
}

/// One line (NDJSON) or one event (SSE) of `POST /v1/sandboxes/{id}/exec/stream` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum ExecFrame {
    /// It runs.
    Started {
        /// Its process id in the guest.
        pid: u32,
    },
    /// It wrote to stdout.
    Stdout {
        /// The text, when it is UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// The bytes in base64, when they are not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
    },
    /// It wrote to stderr.
    Stderr {
        /// The text, when it is UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// The bytes in base64, when they are not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
    },
    /// It ended; the last frame.
    Exit {
        /// Its exit code; negative is the signal that ended it.
        exit_code: i64,
        /// It was killed because its time was up.
        timed_out: bool,
    },
    /// It could not be run, or the sandbox ended; the last frame.
    Error {
        /// What went wrong, for people.
        error: String,
        /// What went wrong, for programs.
        code: crate::ErrorCode,
    },
}

/// Body of `POST /v1/sandboxes/{id}/eval`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EvalRequest {
    /// What to evaluate in the warm interpreter.
    pub code: String,
    /// Seconds after which it is given up *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86400)]
    pub timeout_secs: Option<u64>,
}

/// Answer of `POST /v1/sandboxes/{id}/eval`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EvalResponse {
    /// The value as the interpreter prints it.
    #[schema(required)]
    pub result: Option<String>,
    /// What was raised.
    #[schema(required)]
    pub error: Option<String>,
    /// 0, or 1 when something was raised.
    pub exit_code: i64,
    /// The value as JSON, where the interpreter can say it so *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result_json: Option<String>,
    /// Where it was raised *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceback: Option<String>,
    /// What was printed meanwhile *(extension)*.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stdout: String,
    /// What was printed to the other stream *(extension)*.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stderr: String,
}

/// Answer of `POST /v1/sandboxes/{id}/ping`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PingResponse {
    /// The agent answered.
    pub pong: bool,
    /// The version of NumPy in the warm interpreter, or `not-installed`.
    pub numpy_version: String,
    /// Process id of the agent in the guest.
    pub pid: u32,
    /// The language that `eval` speaks.
    pub agent_lang: String,
    /// The recipe's warm-up is done.
    pub warmup_ready: bool,
    /// The version of the agent *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// Round trip in microseconds *(extension)*.
    #[serde(default)]
    pub rtt_us: u64,
}

/// Answer of `POST /v1/sandboxes/{id}/processes` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessStarted {
    /// Its process id in the guest.
    pub pid: u32,
}

/// A process started through the API *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessInfo {
    /// Its process id in the guest.
    pub pid: u32,
    /// Program and arguments.
    pub args: Vec<String>,
    /// It still runs.
    pub running: bool,
    /// Its exit code, once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
}

/// Body of `POST /v1/sandboxes/{id}/processes/{pid}/signal` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SignalRequest {
    /// The number of the signal.
    #[schema(minimum = 1, maximum = 64)]
    pub signal: u8,
}

/// The first text message on the WebSocket `GET /v1/sandboxes/{id}/terminal` *(extension)*.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TerminalStart {
    /// Program and arguments; a login shell if left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment, over that of the agent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User to run as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Run it on a terminal of this size; without one it gets pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u16>,
    /// Columns of the terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cols: Option<u16>,
}

/// A later text message on that WebSocket; bytes for stdin go as binary messages *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum TerminalInput {
    /// The terminal changed its size.
    Resize {
        /// Rows.
        rows: u16,
        /// Columns.
        cols: u16,
    },
    /// There is nothing more to read.
    Eof,
    /// Send a signal.
    Signal {
        /// The number of the signal.
        signal: u8,
    },
}
