//! Routes that ping the agent, run commands and evaluate code in a sandbox.
//!
//! The output of a command has a limit, and so has its run time. A program that cannot be run is a result with the exit
//! code of a shell, not an error of the daemon. Spans carry no arguments and no environment, because both may hold
//! secrets.

use std::time::Instant;

use axum::Json;
use axum::http::HeaderMap;
use axum::response::Response;
use base64::Engine;
use forkd_agent_client::{Client, Exec, Output};
use forkd_api::{
    ErrorCode, EvalRequest, EvalResponse, ExecFrame, ExecRequest, ExecResponse, PingResponse,
};
use forkd_guest_proto as guest;
use forkd_types::SandboxId;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tracing::Instrument;

use super::owned::OwnedSandbox;
use crate::guest::exec::{self, Program, exit_code, not_started};
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::Body;
use forkd_edge::stream::{Framing, respond};
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::clock;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::sandbox::SandboxHandle;
use forkd_sandboxes::trace::{self, TARGET};

/// The most of each output that one answer holds.
const MAX_OUTPUT: usize = 8 << 20;
/// The longest a command may run.
const MAX_TIMEOUT: u64 = 24 * 3600;
/// How long an eval may run unless the request says otherwise.
const EVAL_TIMEOUT: u64 = 30;
/// Frames that may wait for a slow reader.
pub const FRAMES: usize = 64;

/// Asks the agent whether it is there.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/ping", tag = "guest",
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 200, description = "It is", body = PingResponse)
))]
pub async fn ping(OwnedSandbox(sandbox): OwnedSandbox) -> Answer<Json<PingResponse>> {
    let client = sandbox.agent().await?.by(agent_limits::ping());
    let started = Instant::now();
    let pong = client.ping().await.map_err(Error::agent(format!(
        "sandbox {} does not answer",
        sandbox.id
    )))?;
    let rtt = started.elapsed();
    let interpreters = client.interp_list().await.unwrap_or_default();
    let ready = |state| matches!(state, guest::InterpState::Ready | guest::InterpState::Busy);
    Ok(Json(PingResponse {
        pong: true,
        numpy_version: numpy_version(&sandbox.record().numpy),
        pid: pong.pid,
        agent_lang: interpreters
            .first()
            .map_or("python", |found| found.language.as_str())
            .to_owned(),
        warmup_ready: interpreters.iter().all(|found| ready(found.state)),
        agent_version: Some(pong.version),
        rtt_us: clock::micros(rtt),
    }))
}

fn numpy_version(found: &str) -> String {
    if found.is_empty() {
        "not-installed".to_owned()
    } else {
        found.to_owned()
    }
}

/// A command as the agent takes it.
pub fn guest_exec(
    sandbox: &SandboxHandle,
    request: &ExecRequest,
) -> Result<guest::ExecRequest, Failure> {
    if !(1..=MAX_TIMEOUT).contains(&request.timeout_secs) {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("timeout_secs is 1 to {MAX_TIMEOUT}"),
        ));
    }
    let program = Program {
        args: &request.args,
        env: &request.env,
        cwd: request.cwd.as_deref(),
        user: request.user.as_deref(),
    };
    Ok(guest::ExecRequest {
        timeout_ms: Some(request.timeout_secs.saturating_mul(1000)),
        on_disconnect: guest::OnDisconnect::Kill,
        ..exec::wish(&program, &sandbox.record().environment())?
    })
}

/// Runs a command to its end.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", tag = "guest", request_body = ExecRequest,
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 200, description = "It has ended", body = ExecResponse)
))]
pub async fn exec(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<ExecRequest>,
) -> Answer<Json<ExecResponse>> {
    let wish = guest_exec(&sandbox, &request)?;
    let client = sandbox.agent().await?;
    let client = client.by(agent_limits::command(request.timeout_secs));
    let started = Instant::now();
    let input = request.stdin.unwrap_or_default();
    let done = client
        .exec_capture_with(wish, input.as_bytes(), MAX_OUTPUT)
        .instrument(span("exec", &sandbox.id))
        .await;
    metrics::histogram!("forkd_exec_seconds").record(started.elapsed().as_secs_f64());
    let done = match done {
        Ok(done) => done,
        Err(error) => {
            let (code, stderr) = not_started(error, &request.args)?;
            return Ok(Json(ExecResponse {
                stdout: String::new(),
                stderr,
                exit_code: code,
                timed_out: false,
                truncated: false,
            }));
        }
    };
    Ok(Json(ExecResponse {
        stdout: String::from_utf8_lossy(&done.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&done.stderr).into_owned(),
        exit_code: exit_code(done.result.status),
        timed_out: done.result.timed_out,
        truncated: done.truncated || done.result.output_limit_hit,
    }))
}

/// The span has no arguments and no environment of the command: both may hold secrets.
fn span(what: &str, id: &SandboxId) -> tracing::Span {
    tracing::info_span!(target: TARGET, "guest", otel.name = what, forkd.sandbox = %id)
}

/// Runs a command and sends its output as it comes: NDJSON, or server-sent events if `Accept` asks for
/// them. Each line is an `ExecFrame`; the last is `exit` or `error`. The command is killed when the client
/// goes away.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec/stream", tag = "guest", request_body = ExecRequest,
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 200, description = "Frames, one a line", body = String, content_type = "application/x-ndjson")
))]
pub async fn exec_stream(
    OwnedSandbox(sandbox): OwnedSandbox,
    headers: HeaderMap,
    Body(request): Body<ExecRequest>,
) -> Answer<Response> {
    let mut wish = guest_exec(&sandbox, &request)?;
    wish.stdin = request.stdin.is_some();
    let client = sandbox.agent().await?;
    let (frames, receiver) = mpsc::channel(FRAMES);
    let follow = follow(client, wish, request.stdin, frames);
    trace::spawn(follow.instrument(span("exec", &sandbox.id)));
    Ok(respond(
        Framing::wanted(&headers),
        ReceiverStream::new(receiver),
    ))
}

async fn follow(
    client: Client,
    wish: guest::ExecRequest,
    input: Option<String>,
    frames: mpsc::Sender<ExecFrame>,
) {
    let args = wish.argv.clone();
    let client = client.by(agent_limits::start());
    let started = tokio::select! {
        started = client.exec(wish) => started,
        // The reader left before the command ran: dropping the call cancels it.
        () = frames.closed() => return,
    };
    let exec = match started {
        Ok(exec) => exec,
        Err(error) => {
            for frame in unstarted(error, &args) {
                let _ = frames.send(frame).await;
            }
            return;
        }
    };
    let result = async {
        let stdin = exec.stdin();
        let feed = async {
            if let Some(input) = input {
                stdin.write(input.as_bytes()).await?;
            }
            stdin.close();
            Ok(())
        };
        let ((), ()) = tokio::try_join!(feed, forward(exec, &frames))?;
        Ok::<_, forkd_agent_client::Error>(())
    }
    .await;
    if let Err(error) = result {
        let error = Error::agent("the command did not run to its end")(error);
        let frame = ExecFrame::Error {
            error: error.chain(),
            code: error.code(),
        };
        let _ = frames.send(frame).await;
    }
}

/// The frames for a program that could not be run, in place of its output.
pub fn unstarted(error: forkd_agent_client::Error, args: &[String]) -> Vec<ExecFrame> {
    match not_started(error, args) {
        Ok((exit_code, stderr)) => vec![
            ExecFrame::Stderr {
                text: Some(stderr),
                base64: None,
                offset: 0,
            },
            ExecFrame::Exit {
                exit_code,
                timed_out: false,
            },
        ],
        Err(error) => vec![ExecFrame::Error {
            error: error.chain(),
            code: error.code(),
        }],
    }
}

/// Sends the output of a process until it ends. When the receiver is gone, the process is dropped, which
/// kills it, also if it prints nothing.
pub async fn forward(
    exec: Exec,
    frames: &mpsc::Sender<ExecFrame>,
) -> Result<(), forkd_agent_client::Error> {
    tokio::select! {
        result = forward_all(exec, frames) => result,
        () = frames.closed() => Ok(()),
    }
}

async fn forward_all(
    mut exec: Exec,
    frames: &mpsc::Sender<ExecFrame>,
) -> Result<(), forkd_agent_client::Error> {
    let started = ExecFrame::Started {
        pid: exec.started().pid,
    };
    if frames.send(started).await.is_err() {
        return Ok(());
    }
    let mut at = exec.started().at;
    while let Some(output) = exec.next_output().await? {
        let frame = match output {
            Output::Stdout(bytes) => {
                let offset = advance(&mut at.stdout, bytes.len());
                let (text, base64) = readable(bytes);
                ExecFrame::Stdout {
                    text,
                    base64,
                    offset,
                }
            }
            Output::Stderr(bytes) => {
                let offset = advance(&mut at.stderr, bytes.len());
                let (text, base64) = readable(bytes);
                ExecFrame::Stderr {
                    text,
                    base64,
                    offset,
                }
            }
            Output::Lost { stderr, bytes } => {
                let at = if stderr {
                    &mut at.stderr
                } else {
                    &mut at.stdout
                };
                *at = at.saturating_add(bytes);
                continue;
            }
        };
        if frames.send(frame).await.is_err() {
            return Ok(());
        }
    }
    let result = exec.wait().await?;
    let frame = ExecFrame::Exit {
        exit_code: exit_code(result.status),
        timed_out: result.timed_out,
    };
    let _ = frames.send(frame).await;
    Ok(())
}

/// Moves a position forward and gives where it was.
fn advance(at: &mut u64, count: usize) -> u64 {
    let before = *at;
    *at = at.saturating_add(count as u64);
    before
}

/// Text where it is text, base64 where it is not.
fn readable(bytes: Vec<u8>) -> (Option<String>, Option<String>) {
    match String::from_utf8(bytes) {
        Ok(text) => (Some(text), None),
        Err(error) => {
            let encoded = base64::engine::general_purpose::STANDARD.encode(error.as_bytes());
            (None, Some(encoded))
        }
    }
}

/// Evaluates code in the warm interpreter.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/eval", tag = "guest", request_body = EvalRequest,
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 200, description = "What came of it, an exception included", body = EvalResponse)
))]
pub async fn eval(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<EvalRequest>,
) -> Answer<Json<EvalResponse>> {
    let seconds = request.timeout_secs.unwrap_or(EVAL_TIMEOUT);
    if !(1..=MAX_TIMEOUT).contains(&seconds) {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("timeout_secs is 1 to {MAX_TIMEOUT}"),
        ));
    }
    let client = sandbox.agent().await?;
    let started = Instant::now();
    let done = client
        .by(agent_limits::command(seconds))
        .eval(guest::EvalRequest {
            code: request.code,
            interp: request.interpreter,
            timeout_ms: Some(seconds.saturating_mul(1000)),
            ..guest::EvalRequest::default()
        })
        .instrument(span("eval", &sandbox.id))
        .await
        .map_err(Error::agent(format!(
            "sandbox {} could not evaluate the code",
            sandbox.id
        )))?;
    metrics::histogram!("forkd_eval_seconds").record(started.elapsed().as_secs_f64());
    let (error, traceback) = match done.result.error {
        Some(raised) => (
            Some(format!("{}: {}", raised.name, raised.message)),
            Some(raised.traceback),
        ),
        None if done.result.timed_out => (
            Some(format!("TimeoutError: no result after {seconds} s")),
            None,
        ),
        None => (None, None),
    };
    Ok(Json(EvalResponse {
        exit_code: i64::from(error.is_some()),
        result: done.result.repr,
        error,
        result_json: done.result.json.map(String::from),
        traceback,
        stdout: String::from_utf8_lossy(&done.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&done.stderr).into_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_agent_client::Options;
    use guest::{Control, Decoder, Frame, Hello, Kind, frame};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::sync::oneshot;

    async fn next_frame(io: &mut DuplexStream, decoder: &mut Decoder) -> Frame {
        loop {
            let byte = [io.read_u8().await.unwrap()];
            if let Some(frame) = decoder.next(&mut byte.as_slice()).unwrap() {
                return frame;
            }
        }
    }

    /// Starts a process that prints nothing and never ends, and gives what the host says next.
    async fn silent(mut io: DuplexStream) -> Frame {
        let mut decoder = Decoder::new();
        next_frame(&mut io, &mut decoder).await;
        let hello = serde_json::to_vec(&Hello::default()).unwrap();
        io.write_all(&frame::encode(0, Kind::Hello, 0, &hello))
            .await
            .unwrap();
        let request = next_frame(&mut io, &mut decoder).await;
        let started = br#"{"event": "started", "process": 1, "pid": 7}"#;
        io.write_all(&frame::encode(request.stream, Kind::Event, 0, started))
            .await
            .unwrap();
        next_frame(&mut io, &mut decoder).await
    }

    /// Says hello and nothing else, tells `asked` when the request is there, and gives what the host says after it.
    async fn deaf(mut io: DuplexStream, asked: oneshot::Sender<()>) -> Frame {
        let mut decoder = Decoder::new();
        next_frame(&mut io, &mut decoder).await;
        let hello = serde_json::to_vec(&Hello::default()).unwrap();
        io.write_all(&frame::encode(0, Kind::Hello, 0, &hello))
            .await
            .unwrap();
        let request = next_frame(&mut io, &mut decoder).await;
        assert_eq!(request.kind, Kind::Request);
        asked.send(()).unwrap();
        next_frame(&mut io, &mut decoder).await
    }

    #[tokio::test]
    async fn a_command_that_never_starts_does_not_outlive_its_reader() {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (asked, is_asked) = oneshot::channel();
        let agent = tokio::spawn(deaf(theirs, asked));
        let client = Client::connect(ours, Options::default()).await.unwrap();
        let (frames, reader) = mpsc::channel(FRAMES);
        let following = tokio::spawn(follow(client, guest::ExecRequest::default(), None, frames));
        // A reader that leaves before that has asked for nothing.
        is_asked.await.unwrap();
        drop(reader);
        following.await.unwrap();
        assert_eq!(agent.await.unwrap().kind, Kind::Control);
    }

    #[tokio::test]
    async fn a_silent_command_does_not_outlive_its_reader() {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let agent = tokio::spawn(silent(theirs));
        let client = Client::connect(ours, Options::default()).await.unwrap();
        let client = client.by(agent_limits::start());
        let exec = client.exec(guest::ExecRequest::default()).await.unwrap();
        let (frames, mut reader) = mpsc::channel(FRAMES);
        let forwarding = tokio::spawn(async move { forward(exec, &frames).await });
        assert_eq!(reader.recv().await, Some(ExecFrame::Started { pid: 7 }));
        drop(reader);
        forwarding.await.unwrap().unwrap();
        let said = agent.await.unwrap();
        assert_eq!(said.kind, Kind::Control);
        let said: Control = serde_json::from_slice(&said.payload).unwrap();
        assert_eq!(said, Control::Cancel);
    }
}
