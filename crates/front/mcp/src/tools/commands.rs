//! Tools that run commands and code in a sandbox.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use forkd_api::{EvalRequest, ExecFrame, ExecRequest};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::call::Call;
use crate::clip::Clip;
use crate::refusal::Refusal;
use crate::tool::{Effect, Set, Tool};

/// The hint of an answer whose output was clipped.
const READ_ON: &str =
    "write the output to a file in the sandbox and read its parts with read_file and offset";

/// Arguments of the tool `exec_command`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    pub sandbox_id: String,
    /// Program and arguments. No shell is involved; use ["sh", "-c", "…"] for pipes and variables.
    #[schemars(length(min = 1, max = 4096))]
    pub args: Vec<String>,
    /// Seconds after which the command is killed.
    #[serde(default = "thirty")]
    #[schemars(range(min = 1, max = 86400))]
    pub timeout_secs: u64,
    /// Working directory of the command.
    #[serde(default)]
    pub cwd: Option<String>,
    /// Environment variables of the command.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// User that runs the command.
    #[serde(default)]
    pub user: Option<String>,
    /// Text for standard input.
    #[serde(default)]
    pub stdin: Option<String>,
}

pub fn thirty() -> u64 {
    30
}

/// The result of a command.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Ran {
    /// Standard output; beginning and end if it is long.
    pub stdout: String,
    /// Standard error; beginning and end if it is long.
    pub stderr: String,
    /// Exit code; negative is the number of the signal that ended the command.
    pub exit_code: i64,
    /// Whether the command was killed because its time was over.
    pub timed_out: bool,
    /// Whether output was left out.
    pub truncated: bool,
    /// How to read output that was left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// The bytes of a frame.
pub fn bytes(text: Option<String>, base64: Option<String>) -> Vec<u8> {
    match (text, base64) {
        (Some(text), _) => text.into_bytes(),
        (None, Some(base64)) => STANDARD.decode(base64).unwrap_or_default(),
        (None, None) => Vec::new(),
    }
}

/// An error frame as a refusal.
pub fn frame_error(error: String, code: forkd_api::ErrorCode) -> Refusal {
    Refusal::new(code, error)
}

/// Runs a command to its end. Dropping the future kills the command.
pub async fn exec(call: &Call<'_>, input: ExecInput) -> Result<Ran, Refusal> {
    let request = ExecRequest {
        args: input.args,
        timeout_secs: input.timeout_secs,
        env: input.env,
        cwd: input.cwd,
        user: input.user,
        stdin: input.stdin,
    };
    let mut frames = call.client.exec_stream(&input.sandbox_id, &request).await?;
    let (mut stdout, mut stderr) = (Clip::default(), Clip::default());
    while let Some(frame) = frames.next().await? {
        match frame {
            ExecFrame::Started { .. } | ExecFrame::Keepalive => {}
            ExecFrame::Stdout { text, base64, .. } => {
                let bytes = bytes(text, base64);
                call.note(&String::from_utf8_lossy(&bytes));
                stdout.push(&bytes);
            }
            ExecFrame::Stderr { text, base64, .. } => stderr.push(&bytes(text, base64)),
            ExecFrame::Exit {
                exit_code,
                timed_out,
            } => {
                let truncated = stdout.is_clipped() || stderr.is_clipped();
                return Ok(Ran {
                    stdout: stdout.text(),
                    stderr: stderr.text(),
                    exit_code,
                    timed_out,
                    truncated,
                    hint: truncated.then(|| READ_ON.to_owned()),
                });
            }
            ExecFrame::Error { error, code } => return Err(frame_error(error, code)),
        }
    }
    Err(Refusal::new(
        forkd_api::ErrorCode::SandboxGone,
        "the connection to the sandbox ended before the command did",
    ))
}

/// Implements the tool `exec_command`.
pub struct ExecCommand;

impl Tool for ExecCommand {
    const NAME: &'static str = "exec_command";
    const TITLE: &'static str = "Run a command";
    const ABOUT: &'static str = "Run a command in a sandbox, wait for its end, and return its output and exit code. \
        Use start_process for servers and everything else that goes on.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Runs;
    type Input = ExecInput;
    type Output = Ran;

    async fn run(call: &Call<'_>, input: ExecInput) -> Result<Ran, Refusal> {
        exec(call, input).await
    }
}

/// Arguments of the tool `eval_code`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EvalInput {
    /// ID of the sandbox.
    #[schemars(length(min = 1, max = 64))]
    sandbox_id: String,
    /// Code for the warm interpreter; the value of the last expression is returned.
    #[schemars(length(max = 1048576))]
    code: String,
    /// Seconds after which the code is interrupted.
    #[serde(default)]
    #[schemars(range(min = 1, max = 86400))]
    timeout_secs: Option<u64>,
}

/// The result of code.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Evaluated {
    /// The value as the interpreter prints it.
    result: Option<String>,
    /// The exception, if one was raised.
    error: Option<String>,
    /// 0, or 1 if an exception was raised.
    exit_code: i64,
    /// Traceback of the exception.
    #[serde(skip_serializing_if = "Option::is_none")]
    traceback: Option<String>,
    /// Standard output of the code.
    stdout: String,
    /// Standard error of the code.
    stderr: String,
    /// Whether output was left out.
    truncated: bool,
}

/// Implements the tool `eval_code`.
pub struct EvalCode;

impl Tool for EvalCode {
    const NAME: &'static str = "eval_code";
    const TITLE: &'static str = "Evaluate code";
    const ABOUT: &'static str = "Evaluate code in the warm interpreter of a sandbox (Python unless the image has \
        another one). Variables and imports stay for the next call.";
    const SET: Set = Set::Compat;
    const EFFECT: Effect = Effect::Runs;
    type Input = EvalInput;
    type Output = Evaluated;

    async fn run(call: &Call<'_>, input: EvalInput) -> Result<Evaluated, Refusal> {
        let request = EvalRequest {
            code: input.code,
            timeout_secs: input.timeout_secs,
            interpreter: None,
        };
        let done = call.client.eval_with(&input.sandbox_id, &request).await?;
        let mut truncated = false;
        let mut clip = |text: String| {
            let mut clip = Clip::default();
            clip.push(text.as_bytes());
            truncated |= clip.is_clipped();
            clip.text()
        };
        Ok(Evaluated {
            result: done.result.map(&mut clip),
            error: done.error.map(&mut clip),
            exit_code: done.exit_code,
            traceback: done.traceback.map(&mut clip),
            stdout: clip(done.stdout),
            stderr: clip(done.stderr),
            truncated,
        })
    }
}
