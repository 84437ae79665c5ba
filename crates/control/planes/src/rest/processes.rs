//! Routes that start, list, follow and signal background processes.
//!
//! A background process has no time limit and goes on when the client disconnects. Only processes that were started
//! through the API can be named.

use axum::Json;
use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use forkd_agent_client::Client;
use forkd_api::{
    ErrorCode, ExecFrame, ProcessInfo, ProcessStarted, SignalRequest, StartProcess, TerminalSize,
};
use forkd_guest_proto as guest;
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::IntoParams;

use super::exec::{FRAMES, forward};
use super::owned::OwnedSandbox;
use crate::guest::exec::{self, Program, exit_code};
use crate::guest::process;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::{Body, Chunks, Params};
use forkd_edge::stream::{Framing, respond};
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;

/// The longest label of a process.
const MAX_LABEL: usize = 256;

/// Processes that were started through the API.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes", tag = "guest",
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 200, description = "Those the agent still knows", body = Vec<ProcessInfo>)
))]
pub async fn list(OwnedSandbox(sandbox): OwnedSandbox) -> Answer<Json<Vec<ProcessInfo>>> {
    let found = process::known(&sandbox.agent().await?).await?;
    let shown = found.into_iter().map(|process| ProcessInfo {
        pid: process.pid,
        args: process.argv,
        running: process.state == guest::ProcessState::Running,
        label: process.tag,
        cwd: process.cwd,
        terminal: process.pty,
        exit_code: match process.state {
            guest::ProcessState::Running => None,
            guest::ProcessState::Ended(result) => Some(exit_code(result.status)),
        },
    });
    Ok(Json(shown.collect()))
}

/// Starts a command and lets it run. Its time is not limited.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/processes", tag = "guest", request_body = StartProcess,
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 201, description = "It runs", body = ProcessStarted)
))]
pub async fn start(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<StartProcess>,
) -> Answer<(StatusCode, Json<ProcessStarted>)> {
    if request
        .label
        .as_ref()
        .is_some_and(|label| label.len() > MAX_LABEL)
    {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("label has at most {MAX_LABEL} bytes"),
        ));
    }
    let program = Program {
        args: &request.args,
        env: &request.env,
        cwd: request.cwd.as_deref(),
        user: request.user.as_deref(),
    };
    let wish = guest::ExecRequest {
        stdin: request.open_stdin,
        pty: request.terminal.map(|size| guest::PtySize {
            rows: size.rows.max(1),
            cols: size.cols.max(1),
        }),
        tag: request.label,
        ..exec::wish(&program, &sandbox.record().environment())?
    };
    let started = process::start(&sandbox.agent().await?, wish).await?;
    Ok((
        StatusCode::CREATED,
        Json(ProcessStarted { pid: started.pid }),
    ))
}

/// A process of the path, by its number.
async fn find(client: &Client, pid: &str) -> Result<guest::ProcessInfo, Error> {
    process::find(client, pid, |process| pid.parse() == Ok(process.pid)).await
}

/// Where to begin.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct OutputParams {
    /// Begin at this byte of standard output: the `offset` of a frame plus its length.
    #[serde(default)]
    since: u64,
    /// Begin at this byte of standard error.
    #[serde(default)]
    since_stderr: u64,
}

/// Follows a process that was started in the background: what is kept of its earlier output, then what it prints, and
/// its end. NDJSON, or server-sent events if `Accept` asks for them. It goes on when the client goes away.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes/{pid}/output", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), ("pid" = u32, Path, description = "The process"), OutputParams),
    responses(
    (status = 200, description = "Frames, one a line", body = String, content_type = "application/x-ndjson")
))]
pub async fn output(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
    Params(params): Params<OutputParams>,
    headers: HeaderMap,
) -> Answer<Response> {
    let client = sandbox.agent().await?;
    let process = find(&client, &path.1).await?;
    let since = guest::OutputPosition {
        stdout: params.since,
        stderr: params.since_stderr,
    };
    let exec = process::follow(&client, process.process, Some(since)).await?;
    let (frames, receiver) = mpsc::channel(FRAMES);
    tokio::spawn(async move {
        if let Err(error) = forward(exec, &frames).await {
            let error = Error::agent("the process was lost")(error);
            let frame = ExecFrame::Error {
                error: error.chain(),
                code: error.code(),
            };
            let _ = frames.send(frame).await;
        }
    });
    Ok(respond(
        Framing::wanted(&headers),
        ReceiverStream::new(receiver),
    ))
}

/// Sends a signal to a process that was started through the API.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/processes/{pid}/signal", tag = "guest",
    request_body = SignalRequest,
    params(("id" = String, Path, description = "The sandbox"), ("pid" = u32, Path, description = "The process")),
    responses(
    (status = 204, description = "It is sent")
))]
pub async fn signal(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
    Body(request): Body<SignalRequest>,
) -> Answer<StatusCode> {
    if !(1..=64).contains(&request.signal) {
        return Err(Failure::new(ErrorCode::InvalidRequest, "signal is 1 to 64"));
    }
    let client = sandbox.agent().await?;
    let process = find(&client, &path.1).await?;
    process::check_running(&process)?;
    process::signal(&client, process.process, i32::from(request.signal)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// How the input goes on.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct StdinParams {
    /// Close standard input after these bytes.
    #[serde(default)]
    eof: bool,
}

/// Writes to the standard input of a process, as fast as the process reads. Answers when it has taken all bytes.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/processes/{pid}/stdin", tag = "guest",
    request_body(content = String, content_type = "application/octet-stream"),
    params(("id" = String, Path, description = "The sandbox"), ("pid" = u32, Path, description = "The process"), StdinParams),
    responses(
    (status = 204, description = "It is taken")
))]
pub async fn stdin(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
    Params(params): Params<StdinParams>,
    mut body: Chunks,
) -> Answer<StatusCode> {
    let client = sandbox.agent().await?;
    let process = find(&client, &path.1).await?;
    process::check_running(&process)?;
    let input = process::input(&client, process.process, params.eof)?;
    while let Some(chunk) = body.next().await? {
        input
            .write(&chunk, agent_limits::start())
            .await
            .map_err(process::no_input())?;
    }
    input
        .finish(agent_limits::start())
        .await
        .map_err(process::no_input())?;
    Ok(StatusCode::NO_CONTENT)
}

/// Tells the terminal of a process its size.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/processes/{pid}/resize", tag = "guest",
    request_body = TerminalSize,
    params(("id" = String, Path, description = "The sandbox"), ("pid" = u32, Path, description = "The process")),
    responses(
    (status = 204, description = "It is done")
))]
pub async fn resize(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
    Body(size): Body<TerminalSize>,
) -> Answer<StatusCode> {
    let client = sandbox.agent().await?;
    let process = find(&client, &path.1).await?;
    process::check_running(&process)?;
    process::resize(&client, process.process, size.rows, size.cols).await?;
    Ok(StatusCode::NO_CONTENT)
}
