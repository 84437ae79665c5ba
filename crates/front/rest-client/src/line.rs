//! The line-based protocol of the published `Sandbox` class, answered through the API.
//!
//! A connection carries one request, a JSON object on a line, and one answer:
//!
//! | request | answer |
//! |---|---|
//! | `{"action": "ping"}` | `pong`, `numpy_version`, `pid`, `agent_lang`, `warmup_ready` |
//! | `{"action": "exec", "args": […], "timeout": 30}` | `stdout`, `stderr`, `exit_code` |
//! | `{"action": "eval", "code": "…"}` | `result` or `error`, and `exit_code` |
//!
//! The protocol has no token. Guests therefore do not serve it: a program of any user in the guest could run commands as
//! root with it.

use forkd_api::ExecRequest;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};

use crate::{Client, Error};

/// The longest request.
const MAX_REQUEST: u64 = 16 << 20;
/// Seconds that a command may run unless the request says otherwise.
const TIMEOUT: f64 = 30.0;
/// The longest that a request may ask for.
const MAX_TIMEOUT: f64 = 24.0 * 3600.0;

#[derive(Debug, Deserialize)]
struct LineRequest {
    action: Option<String>,
    #[serde(default)]
    args: Vec<String>,
    timeout: Option<f64>,
    code: Option<String>,
}

impl Client {
    /// Answers one request of the line-based protocol for a sandbox.
    pub async fn serve_line<S>(&self, id: &str, stream: &mut S) -> std::io::Result<()>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut line = Vec::new();
        let mut reader = BufReader::new(&mut *stream).take(MAX_REQUEST);
        reader.read_until(b'\n', &mut line).await?;
        if line.trim_ascii().is_empty() {
            return Ok(());
        }
        let mut answer = serde_json::to_vec(&self.line(id, &line).await)?;
        answer.push(b'\n');
        stream.write_all(&answer).await?;
        stream.shutdown().await
    }

    async fn line(&self, id: &str, line: &[u8]) -> Value {
        let request: LineRequest = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(error) => return failure(&format!("JSONDecodeError: {error}")),
        };
        let answer = match request.action.as_deref() {
            Some("ping") => self.line_ping(id).await,
            Some("exec") => self.line_exec(id, request).await,
            Some("eval") => self.line_eval(id, &request.code.unwrap_or_default()).await,
            other => {
                let other = other.unwrap_or("None");
                return json!({ "error": format!("unknown action: {other}"), "exit_code": 1 });
            }
        };
        answer.unwrap_or_else(|error| failure(&format!("RuntimeError: {error}")))
    }

    async fn line_ping(&self, id: &str) -> Result<Value, Error> {
        let pong = self.ping(id).await?;
        Ok(json!({
            "pong": pong.pong,
            "numpy_version": pong.numpy_version,
            "pid": pong.pid,
            "agent_lang": pong.agent_lang,
            "warmup_ready": pong.warmup_ready,
        }))
    }

    async fn line_exec(&self, id: &str, request: LineRequest) -> Result<Value, Error> {
        let seconds = request.timeout.unwrap_or(TIMEOUT).clamp(1.0, MAX_TIMEOUT);
        let program = request.args.first().cloned().unwrap_or_default();
        let exec = ExecRequest {
            args: request.args,
            timeout_secs: seconds.ceil() as u64,
            ..ExecRequest::default()
        };
        let done = self.exec(id, &exec).await?;
        if done.timed_out {
            let text = format!("TimeoutExpired: {program:?} timed out after {seconds} seconds");
            return Ok(failure(&text));
        }
        Ok(json!({
            "stdout": done.stdout,
            "stderr": done.stderr,
            "exit_code": done.exit_code,
        }))
    }

    async fn line_eval(&self, id: &str, code: &str) -> Result<Value, Error> {
        let done = self.eval(id, code).await?;
        Ok(match (done.error, done.result) {
            (Some(error), _) => failure(&error),
            (None, Some(result)) => json!({ "result": result, "exit_code": 0 }),
            // An interpreter without a text form of values, such as Node.
            (None, None) => json!({ "result_json": done.result_json, "exit_code": 0 }),
        })
    }
}

fn failure(error: &str) -> Value {
    json!({ "error": error, "traceback": error, "exit_code": 1 })
}
