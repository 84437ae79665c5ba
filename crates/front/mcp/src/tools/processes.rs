//! Tools for programs that go on in the background.

use std::collections::BTreeMap;
use std::time::Duration;

use forkd_api::ExecFrame;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout_at};

use super::commands::{bytes, frame_error};
use crate::call::Call;
use crate::clip;
use crate::refusal::Refusal;
use crate::tool::{Effect, Set, Tool};

/// The longest wait for output, in seconds.
const MAX_WAIT: u64 = 60;
/// Output that follows within this time belongs to the same answer.
const QUIET: Duration = Duration::from_millis(200);
const SIGKILL: u8 = 9;

/// Arguments of the tool `start_process`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Program and arguments. No shell is involved.
    #[schemars(length(min = 1, max = 4096))]
    args: Vec<String>,
    /// Working directory of the program.
    #[serde(default)]
    cwd: Option<String>,
    /// Environment variables of the program.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// User that runs the program.
    #[serde(default)]
    user: Option<String>,
}

/// A process that was started.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Started {
    /// Process ID for read_process and stop_process.
    pid: u32,
}

/// Implements the tool `start_process`.
pub struct StartProcess;

impl Tool for StartProcess {
    const NAME: &'static str = "start_process";
    const TITLE: &'static str = "Start a process";
    const ABOUT: &'static str = "Start a program in the background of a sandbox, such as a server. \
        It goes on until it ends or stop_process ends it.";
    const SET: Set = Set::Core;
    const EFFECT: Effect = Effect::Runs;
    type Input = StartInput;
    type Output = Started;

    async fn run(call: &Call<'_>, input: StartInput) -> Result<Started, Refusal> {
        let request = forkd_api::StartProcess {
            args: input.args,
            env: input.env,
            cwd: input.cwd,
            user: input.user,
            ..forkd_api::StartProcess::default()
        };
        let started = call
            .client
            .start_process(&input.sandbox_id, &request)
            .await?;
        Ok(Started { pid: started.pid })
    }
}

/// Arguments of the tool `read_process`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReadInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Process ID that start_process returned.
    pid: u32,
    /// Position in standard output to read from; next_since of the last answer.
    #[serde(default)]
    since: u64,
    /// Position in standard error to read from; next_since_stderr of the last answer.
    #[serde(default)]
    since_stderr: u64,
    /// Seconds to wait for output if there is none yet.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 60))]
    wait_secs: u64,
}

fn one() -> u64 {
    1
}

/// Output of a process.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub struct Output {
    /// Standard output from the position on, at most 32 KiB.
    stdout: String,
    /// Standard error from the position on, at most 32 KiB.
    stderr: String,
    /// Position for the next call.
    next_since: u64,
    /// Position in standard error for the next call.
    next_since_stderr: u64,
    /// Whether the process still runs.
    running: bool,
    /// Exit code, after the process has ended and all its output was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i64>,
}

/// Output that was read so far.
#[derive(Default)]
struct Reading {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    positions: (u64, u64),
    exit_code: Option<i64>,
}

impl Reading {
    /// Takes a frame; false after the last one.
    fn take(&mut self, frame: ExecFrame) -> Result<bool, Refusal> {
        match frame {
            ExecFrame::Started { .. } | ExecFrame::Keepalive => {}
            ExecFrame::Stdout {
                text,
                base64,
                offset,
            } => {
                let bytes = bytes(text, base64);
                self.positions.0 = offset + bytes.len() as u64;
                self.stdout.extend(bytes);
            }
            ExecFrame::Stderr {
                text,
                base64,
                offset,
            } => {
                let bytes = bytes(text, base64);
                self.positions.1 = offset + bytes.len() as u64;
                self.stderr.extend(bytes);
            }
            ExecFrame::Exit { exit_code, .. } => {
                self.exit_code = Some(exit_code);
                return Ok(false);
            }
            ExecFrame::Error { error, code } => return Err(frame_error(error, code)),
        }
        Ok(self.stdout.len() < clip::LIMIT && self.stderr.len() < clip::LIMIT)
    }

    fn is_empty(&self) -> bool {
        self.stdout.is_empty() && self.stderr.is_empty()
    }

    /// Cuts the outputs to their limit; positions go back by what is cut off.
    fn finish(mut self) -> Output {
        let cut = |bytes: &mut Vec<u8>, position: &mut u64| {
            let surplus = bytes.len().saturating_sub(clip::LIMIT);
            bytes.truncate(bytes.len() - surplus);
            *position -= surplus as u64;
            surplus > 0
        };
        let more = cut(&mut self.stdout, &mut self.positions.0)
            | cut(&mut self.stderr, &mut self.positions.1);
        Output {
            stdout: String::from_utf8_lossy(&self.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&self.stderr).into_owned(),
            next_since: self.positions.0,
            next_since_stderr: self.positions.1,
            running: self.exit_code.is_none(),
            exit_code: self.exit_code.filter(|_| !more),
        }
    }
}

/// Implements the tool `read_process`.
pub struct ReadProcess;

impl Tool for ReadProcess {
    const NAME: &'static str = "read_process";
    const TITLE: &'static str = "Read the output of a process";
    const ABOUT: &'static str = "Read what a background process has printed since a position, and whether it still \
        runs. Waits a moment for output if there is none.";
    const SET: Set = Set::Core;
    const EFFECT: Effect = Effect::Reads;
    type Input = ReadInput;
    type Output = Output;

    async fn run(call: &Call<'_>, input: ReadInput) -> Result<Output, Refusal> {
        if input.wait_secs > MAX_WAIT {
            return Err(Refusal::invalid(format!("wait_secs is 0 to {MAX_WAIT}")));
        }
        let since = (input.since, input.since_stderr);
        let mut frames = call
            .client
            .process_output(&input.sandbox_id, input.pid, since)
            .await?;
        let mut reading = Reading {
            positions: since,
            ..Reading::default()
        };
        let patience = Instant::now() + Duration::from_secs(input.wait_secs);
        loop {
            let quiet = Instant::now() + QUIET;
            let until = if reading.is_empty() {
                patience.max(quiet)
            } else {
                quiet
            };
            match timeout_at(until, frames.next()).await {
                Err(_) => break,
                Ok(frame) => match frame? {
                    None => break,
                    Some(frame) => {
                        if !reading.take(frame)? {
                            break;
                        }
                    }
                },
            }
        }
        Ok(reading.finish())
    }
}

/// Arguments of the tool `stop_process`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StopInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Process ID that start_process returned.
    pid: u32,
    /// Number of the signal: 15 asks the process to end, 9 kills it, 2 interrupts it.
    #[serde(default = "kill")]
    #[schemars(range(min = 1, max = 64))]
    signal: u8,
}

fn kill() -> u8 {
    SIGKILL
}

/// A process that got a signal.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Stopped {
    /// Process ID in the guest.
    pid: u32,
    /// Number of the signal that was sent.
    signal: u8,
}

/// Implements the tool `stop_process`.
pub struct StopProcess;

impl Tool for StopProcess {
    const NAME: &'static str = "stop_process";
    const TITLE: &'static str = "Stop a process";
    const ABOUT: &'static str =
        "Send a signal to a background process of a sandbox; SIGKILL by default.";
    const SET: Set = Set::Core;
    const EFFECT: Effect = Effect::Replaces;
    type Input = StopInput;
    type Output = Stopped;

    async fn run(call: &Call<'_>, input: StopInput) -> Result<Stopped, Refusal> {
        call.client
            .signal_process(&input.sandbox_id, input.pid, input.signal)
            .await?;
        Ok(Stopped {
            pid: input.pid,
            signal: input.signal,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_point_behind_what_was_returned() {
        let mut reading = Reading::default();
        let frame = ExecFrame::Stdout {
            text: Some("a".repeat(clip::LIMIT + 10)),
            base64: None,
            offset: 5,
        };
        assert!(!reading.take(frame).unwrap());
        let output = reading.finish();
        assert_eq!(output.stdout.len(), clip::LIMIT);
        assert_eq!(output.next_since, 5 + clip::LIMIT as u64);
        assert!(output.running && output.exit_code.is_none());
    }
}
