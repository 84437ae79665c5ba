//! The line-based protocol that older clients speak on TCP: one JSON object per connection and direction.

use std::rc::Rc;
use std::time::Duration;

use forkd_guest_proto::{EvalMode, ExecRequest, ExitStatus, LEGACY_PORT};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::agent::Agent;
use crate::interp;
use crate::process::{Follower, Read};

/// The longest request.
const MAX_REQUEST: u64 = 16 * 1024 * 1024;
/// The bytes of each output of a command that are kept.
const MAX_OUTPUT: usize = 16 * 1024 * 1024;
const DEFAULT_TIMEOUT_S: f64 = 30.0;
/// How long a client may take to send its request.
const REQUEST_TIME: Duration = Duration::from_secs(60);
/// Connections that may be served at once.
const MAX_CONNECTIONS: usize = 64;

#[derive(Deserialize)]
struct Request {
    action: Option<String>,
    args: Option<Value>,
    timeout: Option<f64>,
    code: Option<String>,
}

/// Serves for ever.
pub async fn serve(agent: Rc<Agent>) -> std::io::Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", LEGACY_PORT)).await?;
    let places = Rc::new(tokio::sync::Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (agent, places) = (Rc::clone(&agent), Rc::clone(&places));
        tokio::task::spawn_local(async move {
            if let Ok(_place) = places.acquire().await {
                let _ = answer_one(&agent, stream).await;
            }
        });
    }
}

async fn answer_one(agent: &Agent, mut stream: TcpStream) -> std::io::Result<()> {
    let (reader, mut writer) = stream.split();
    let mut line = Vec::new();
    let mut reader = BufReader::new(reader.take(MAX_REQUEST));
    let read = reader.read_until(b'\n', &mut line);
    if tokio::time::timeout(REQUEST_TIME, read).await.is_err() || line.trim_ascii().is_empty() {
        return Ok(());
    }
    let mut reply = serde_json::to_vec(&answer(agent, &line).await)?;
    reply.push(b'\n');
    writer.write_all(&reply).await?;
    writer.shutdown().await
}

async fn answer(agent: &Agent, line: &[u8]) -> Value {
    let request: Request = match serde_json::from_slice(line) {
        Ok(request) => request,
        Err(error) => return failure(&format!("JSONDecodeError: {error}"), ""),
    };
    match request.action.as_deref() {
        Some("ping") => ping(agent).await,
        Some("exec") => exec(agent, request).await,
        Some("eval") => eval(agent, request.code.as_deref().unwrap_or("")).await,
        other => {
            json!({ "error": format!("unknown action: {}", other.unwrap_or("None")), "exit_code": 1 })
        }
    }
}

fn failure(error: &str, traceback: &str) -> Value {
    let traceback = if traceback.is_empty() {
        error
    } else {
        traceback
    };
    json!({ "error": error, "traceback": traceback, "exit_code": 1 })
}

async fn ping(agent: &Agent) -> Value {
    let code = "getattr(__import__('sys').modules.get('numpy'), '__version__', 'not-installed')";
    let version = match agent.interps.is_ready("python") {
        true => interp::evaluate(agent, "python", EvalMode::Eval, code)
            .await
            .ok()
            .and_then(|answer| answer.json?.parse::<String>().ok()),
        false => None,
    };
    json!({
        "pong": true,
        "numpy_version": version.unwrap_or_else(|| "not-installed".to_owned()),
        "pid": std::process::id(),
        "agent_lang": "python",
        "warmup_ready": agent.interps.is_ready("python"),
    })
}

async fn eval(agent: &Agent, code: &str) -> Value {
    match interp::evaluate(agent, "python", EvalMode::Eval, code).await {
        Ok(answer) => match answer.error {
            Some(error) => failure(
                &format!("{}: {}", error.name, error.message),
                &error.traceback,
            ),
            None => {
                json!({ "result": answer.repr.unwrap_or_else(|| "None".to_owned()), "exit_code": 0 })
            }
        },
        Err(error) => failure(&format!("RuntimeError: {}", error.message), ""),
    }
}

async fn exec(agent: &Agent, request: Request) -> Value {
    let Some(Ok(argv)) = request.args.map(serde_json::from_value::<Vec<String>>) else {
        return failure("TypeError: args must be a list of strings", "");
    };
    let timeout = request
        .timeout
        .filter(|time| time.is_finite())
        .unwrap_or(DEFAULT_TIMEOUT_S)
        .max(0.0);
    let start = ExecRequest {
        argv: argv.clone(),
        cwd: Some("/".to_owned()),
        timeout_ms: Some(
            Duration::try_from_secs_f64(timeout).map_or(u64::MAX, |time| time.as_millis() as u64),
        ),
        grace_ms: Some(0),
        background: true,
        ..Default::default()
    };
    let process = match agent.processes.start(&start) {
        Ok(process) => process,
        Err(error) => return failure(&format!("OSError: {}", error.message), ""),
    };
    let stdout = process.stdout.follow(true, true);
    let stderr = process.stderr.as_ref().map(|log| log.follow(true, true));
    let (stdout, stderr) = tokio::join!(collect(Some(stdout)), collect(stderr));
    let result = process.wait().await;
    let _ = agent.processes.forget(process.id);
    if result.timed_out {
        let error = format!("TimeoutExpired: Command {argv:?} timed out after {timeout} seconds");
        return failure(&error, "");
    }
    let code = match result.status {
        ExitStatus::Code(code) => code,
        ExitStatus::Signal(signal) => -signal,
    };
    json!({ "stdout": stdout, "stderr": stderr, "exit_code": code })
}

async fn collect(follower: Option<Follower>) -> String {
    let mut kept = Vec::new();
    while let Some(follower) = &follower {
        follower.ready().await;
        match follower.read(64 * 1024) {
            Some(Read::Bytes { bytes, .. }) => {
                let room = MAX_OUTPUT.saturating_sub(kept.len());
                kept.extend_from_slice(bytes.get(..room).unwrap_or(&bytes));
            }
            Some(Read::End) => break,
            None => {}
        }
    }
    String::from_utf8_lossy(&kept).into_owned()
}
