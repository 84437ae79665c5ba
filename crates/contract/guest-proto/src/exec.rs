//! Requests that run programs, follow their output and signal them, and their results.

use serde::{Deserialize, Serialize};

/// The agent's number for a process it started; never used twice.
pub type ProcessId = u64;

/// Runs a program. Standard input comes on [`crate::channel::IN`], output goes to
/// [`crate::channel::OUT`] and [`crate::channel::ERR`]. [`crate::Event::Started`] comes first, and the
/// response is an [`ExecResult`]; in the background it is [`Started`] and comes at once.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecRequest {
    /// Program and arguments. Exactly one of this and `shell` is given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub argv: Vec<String>,
    /// A line for `/bin/sh -c`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shell: Option<String>,
    /// Added to the default environment; a `None` takes a variable away.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<(String, Option<String>)>,
    /// Start from an empty environment.
    pub clear_env: bool,
    /// Where to run; the user's home or `/` when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// A name, a number, or `uid:gid`; the agent's own user when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Standard input is wanted; otherwise it is empty.
    pub stdin: bool,
    /// Run under a pseudo-terminal of this size: input and output are one, stderr is not apart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<PtySize>,
    /// Ask the process group to end after this time, then kill it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// How long after the polite signal the process group is killed; one second when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
    /// Limits of the process.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rlimits: Vec<Rlimit>,
    /// Answer at once and let it run.
    pub background: bool,
    /// Fate of the process when the connection is lost.
    pub on_disconnect: OnDisconnect,
    /// How many bytes of the newest output are kept for those who attach later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_output: Option<u32>,
    /// Kill the process group once it has printed this many bytes (both outputs together).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_limit: Option<u64>,
    /// A label for the process list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// Fate of a process when the connection it was started on is lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDisconnect {
    /// It runs on and can be attached to: a sandbox outlives its daemon, and a branch has no connection to
    /// begin with.
    #[default]
    Keep,
    /// Its process group is killed.
    Kill,
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PtySize {
    /// Lines of the terminal.
    pub rows: u16,
    /// Characters per line.
    pub cols: u16,
}

/// One resource limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rlimit {
    pub resource: RlimitResource,
    /// The limit; soft and hard alike. `None` is no limit.
    pub limit: Option<u64>,
}

/// The resource of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RlimitResource {
    /// Address space, bytes.
    As,
    /// Core file, bytes.
    Core,
    /// Processor time, seconds.
    Cpu,
    /// Data segment, bytes.
    Data,
    /// Largest file, bytes.
    Fsize,
    /// Locked memory, bytes.
    Memlock,
    /// Number of open files.
    Nofile,
    /// Processes of the user.
    Nproc,
    /// Size of the stack, bytes.
    Stack,
}

/// A process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// The agent's number for it.
    pub process: ProcessId,
    /// The kernel's number for it.
    pub pid: u32,
    /// Where the output that follows begins: bytes that the process printed before.
    #[serde(default)]
    pub at: OutputPosition,
}

/// A position in each output of a process, in bytes from its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutputPosition {
    /// In standard output, or in the output of a terminal.
    pub stdout: u64,
    /// In standard error.
    pub stderr: u64,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitStatus {
    /// The process exited with this code.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
}

impl ExitStatus {
    /// The one number that shells make of it.
    #[must_use]
    pub const fn shell_code(self) -> i32 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }

    /// It returned zero.
    #[must_use]
    pub const fn success(self) -> bool {
        matches!(self, Self::Code(0))
    }
}

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecResult {
    /// The agent's number for it.
    pub process: ProcessId,
    /// How it ended.
    pub status: ExitStatus,
    /// Its time was over.
    #[serde(default)]
    pub timed_out: bool,
    /// It printed more than it may.
    #[serde(default)]
    pub output_limit_hit: bool,
    /// How long it ran.
    #[serde(default)]
    pub wall_ms: u64,
    /// Resources that it used.
    #[serde(default)]
    pub usage: ResourceUsage,
}

/// Resources that a process used, its reaped children included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResourceUsage {
    /// Processor time outside the kernel, microseconds.
    pub user_us: u64,
    /// Processor time in the kernel, microseconds.
    pub system_us: u64,
    /// The largest resident size, KiB.
    pub max_rss_kib: u64,
}

/// Follows the output of a process; the response comes when it ends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AttachRequest {
    pub process: ProcessId,
    /// Begin with what is kept of earlier output.
    pub replay: bool,
    /// With `replay`: not before this position.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<OutputPosition>,
    /// Feed [`crate::channel::IN`] to its standard input.
    pub stdin: bool,
    /// Hold the process up rather than lose output that this stream has not taken yet.
    pub lossless: bool,
}

/// Writes [`crate::channel::IN`], up to its end, to the standard input of a process that was started with one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InputRequest {
    pub process: ProcessId,
    /// Close the standard input afterwards; on a terminal, send the character that ends input.
    pub eof: bool,
}

/// Sends a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalRequest {
    /// To which process.
    pub process: ProcessId,
    /// The signal's number.
    pub signal: i32,
    /// To the whole process group.
    #[serde(default)]
    pub group: bool,
}

/// A process that the agent started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInfo {
    /// The agent's number for it.
    pub process: ProcessId,
    /// The kernel's number for it.
    pub pid: u32,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The label of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// The user of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Where it was started.
    #[serde(default)]
    pub cwd: String,
    /// When it was started, milliseconds since the epoch.
    #[serde(default)]
    pub started_unix_ms: u64,
    /// It has a terminal.
    #[serde(default)]
    pub pty: bool,
    /// It was started in the background.
    #[serde(default)]
    pub background: bool,
    /// Whether it still runs.
    pub state: ProcessState,
    /// Bytes printed so far.
    #[serde(default)]
    pub output_bytes: u64,
}

/// Whether a process still runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessState {
    Running,
    /// It ended; its entry stays for those who ask late, until it is removed or crowded out.
    Ended(ExecResult),
}
