//! Programs in a sandbox: commands, interpreters, background processes, terminals.
//!
//! A command has three forms: one response ([`ExecResponse`]), a stream of [`ExecFrame`]s, or a WebSocket
//! that starts with [`TerminalStart`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of `POST /v1/sandboxes/{id}/exec` and `…/exec/stream`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecRequest {
    /// Program and arguments.
    #[schema(min_items = 1, max_items = 4096)]
    pub args: Vec<String>,
    /// Timeout in seconds; the program is killed afterwards.
    #[serde(default = "default_timeout")]
    #[schema(default = 30, minimum = 1, maximum = 86400)]
    pub timeout_secs: u64,
    /// Environment variables in addition to those of the agent *(extension)*.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User to run as *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Standard input of the program *(extension)*.
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

/// Response to `POST /v1/sandboxes/{id}/exec`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecResponse {
    /// Standard output; bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Standard error; bytes that are not UTF-8 are replaced.
    pub stderr: String,
    /// Exit code; negative is the number of the signal that ended the program.
    pub exit_code: i64,
    /// Whether the program was killed because its timeout expired *(extension)*.
    #[serde(default)]
    pub timed_out: bool,
    /// Whether output was cut off because it was too long *(extension)*.
    #[serde(default)]
    pub truncated: bool,
}

/// One line (NDJSON) or one event (SSE) of `POST /v1/sandboxes/{id}/exec/stream` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum ExecFrame {
    /// The program runs.
    Started {
        /// Process ID in the guest.
        pid: u32,
    },
    /// Data on standard output.
    Stdout {
        /// The data, if it is UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// The data in base64, if it is not UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
        /// Position of the first byte in this output, counted from the start of the program.
        #[serde(default)]
        offset: u64,
    },
    /// Data on standard error.
    Stderr {
        /// The data, if it is UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// The data in base64, if it is not UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
        /// Position of the first byte in this output, counted from the start of the program.
        #[serde(default)]
        offset: u64,
    },
    /// Nothing happened for 15 seconds; the program still runs.
    Keepalive,
    /// The program ended; the last frame.
    Exit {
        /// Exit code; negative is the number of the signal that ended the program.
        exit_code: i64,
        /// Whether the program was killed because its timeout expired.
        timed_out: bool,
    },
    /// The program could not be started, or the sandbox ended; the last frame.
    Error {
        /// Message for people.
        error: String,
        /// Code for programs.
        code: crate::ErrorCode,
    },
}

/// Body of `POST /v1/sandboxes/{id}/eval`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EvalRequest {
    /// Code for the warm interpreter.
    pub code: String,
    /// Timeout in seconds *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 86400)]
    pub timeout_secs: Option<u64>,
    /// Name of the interpreter; `python` by default *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interpreter: Option<String>,
}

/// Response to `POST /v1/sandboxes/{id}/eval`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EvalResponse {
    /// The value as the interpreter prints it.
    #[schema(required)]
    pub result: Option<String>,
    /// The exception, if one was raised.
    #[schema(required)]
    pub error: Option<String>,
    /// 0, or 1 if an exception was raised.
    pub exit_code: i64,
    /// The value as JSON, if the interpreter can convert it *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result_json: Option<String>,
    /// Traceback of the exception *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceback: Option<String>,
    /// Standard output during the call *(extension)*.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stdout: String,
    /// Standard error during the call *(extension)*.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stderr: String,
}

/// Response to `POST /v1/sandboxes/{id}/ping`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PingResponse {
    /// Whether the agent answered.
    pub pong: bool,
    /// Version of NumPy in the warm interpreter, or `not-installed`.
    pub numpy_version: String,
    /// Process ID of the agent in the guest.
    pub pid: u32,
    /// Language of `eval`.
    pub agent_lang: String,
    /// Whether the recipe's warm-up is done.
    pub warmup_ready: bool,
    /// Version of the agent *(extension)*.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_version: Option<String>,
    /// Round trip in microseconds *(extension)*.
    #[serde(default)]
    pub rtt_us: u64,
}

/// Body of `POST /v1/sandboxes/{id}/processes` *(extension)*.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StartProcess {
    /// Program and arguments.
    #[schema(min_items = 1, max_items = 4096)]
    pub args: Vec<String>,
    /// Environment variables in addition to those of the sandbox.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory of the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User to run as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Keep standard input open for `POST …/processes/{pid}/stdin`; otherwise it is empty.
    #[serde(default)]
    pub open_stdin: bool,
    /// Run on a terminal of this size. A terminal always takes input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
    /// Label of the process in the list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 256)]
    pub label: Option<String>,
}

/// The size of a terminal, and the body of `POST /v1/sandboxes/{id}/processes/{pid}/resize` *(extension)*.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TerminalSize {
    /// Rows of the terminal.
    #[schema(minimum = 1)]
    pub rows: u16,
    /// Columns of the terminal.
    #[schema(minimum = 1)]
    pub cols: u16,
}

/// Body of `POST /v1/sandboxes/{id}/interpreters` *(extension)*.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StartInterpreter {
    /// Name of the interpreter; the language by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 64)]
    pub name: Option<String>,
    /// `python` or `node`.
    pub language: String,
    /// Environment variables in addition to those of the sandbox.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory of the interpreter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User to run as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// An interpreter that keeps its state between calls *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InterpreterInfo {
    /// Name of the interpreter.
    pub name: String,
    /// `python` or `node`.
    pub language: String,
    /// Version of the interpreter.
    pub version: String,
    /// Process ID in the guest; 0 if it does not run.
    pub pid: u32,
    /// Whether it takes calls.
    pub ready: bool,
    /// How often it was replaced.
    pub restarts: u64,
    /// Number of calls that it answered.
    pub calls: u64,
}

/// Response to `POST /v1/sandboxes/{id}/processes` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessStarted {
    /// Process ID in the guest.
    pub pid: u32,
}

/// A process that was started through the API *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ProcessInfo {
    /// Process ID in the guest.
    pub pid: u32,
    /// Program and arguments.
    pub args: Vec<String>,
    /// Whether the process still runs.
    pub running: bool,
    /// Label of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Working directory at its start.
    #[serde(default)]
    pub cwd: String,
    /// Whether the process has a terminal.
    #[serde(default)]
    pub terminal: bool,
    /// Exit code, after the process has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
}

/// Body of `POST /v1/sandboxes/{id}/processes/{pid}/signal` *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SignalRequest {
    /// Number of the signal.
    #[schema(minimum = 1, maximum = 64)]
    pub signal: u8,
}

/// The first text message on the WebSocket `GET /v1/sandboxes/{id}/terminal` *(extension)*.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TerminalStart {
    /// Program and arguments; a login shell by default.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Environment variables in addition to those of the agent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory of the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User to run as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Rows of the terminal. Without them the program gets pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u16>,
    /// Columns of the terminal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cols: Option<u16>,
}

/// A later text message on the same WebSocket; standard input goes as binary messages *(extension)*.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum TerminalInput {
    /// The size of the terminal changed.
    Resize {
        /// Rows of the terminal.
        rows: u16,
        /// Columns of the terminal.
        cols: u16,
    },
    /// End of standard input.
    Eof,
    /// Send a signal to the program.
    Signal {
        /// Number of the signal.
        signal: u8,
    },
}
