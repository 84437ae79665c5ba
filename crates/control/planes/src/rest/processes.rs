//! Routes that start, list, follow and signal background processes.
//!
//! A background process has no time limit and goes on when the client disconnects. Only processes that were started
//! through the API can be named.

use axum::Json;
use axum::extract::Path;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use forkd_agent_client::Client;
use forkd_api::{ErrorCode, ExecFrame, ExecRequest, ProcessInfo, ProcessStarted, SignalRequest};
use forkd_guest_proto as guest;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::exec::{FRAMES, exit_code, forward, guest_exec};
use super::owned::OwnedSandbox;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::Body;
use forkd_edge::stream::{Framing, respond};
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;

/// Processes that were started through the API.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes", tag = "guest",
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 200, description = "Those the agent still knows", body = Vec<ProcessInfo>)
))]
pub async fn list(OwnedSandbox(sandbox): OwnedSandbox) -> Answer<Json<Vec<ProcessInfo>>> {
    let found = known(&sandbox.agent().await?).await?;
    let shown = found.into_iter().map(|process| ProcessInfo {
        pid: process.pid,
        args: process.argv,
        running: process.state == guest::ProcessState::Running,
        exit_code: match process.state {
            guest::ProcessState::Running => None,
            guest::ProcessState::Ended(result) => Some(exit_code(result.status)),
        },
    });
    Ok(Json(shown.collect()))
}

async fn known(client: &Client) -> Result<Vec<guest::ProcessInfo>, Error> {
    client
        .by(agent_limits::answer())
        .processes()
        .await
        .map_err(Error::agent("the processes cannot be listed"))
}

/// Starts a command and lets it run. Its time is not limited, whatever `timeout_secs` says.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/processes", tag = "guest", request_body = ExecRequest,
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 201, description = "It runs", body = ProcessStarted)
))]
pub async fn start(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<ExecRequest>,
) -> Answer<(StatusCode, Json<ProcessStarted>)> {
    let wish = guest::ExecRequest {
        timeout_ms: None,
        on_disconnect: guest::OnDisconnect::Keep,
        ..guest_exec(&request)?
    };
    let client = sandbox.agent().await?;
    let started = client
        .by(agent_limits::start())
        .start(wish)
        .await
        .map_err(Error::agent("the command could not be started"))?;
    Ok((
        StatusCode::CREATED,
        Json(ProcessStarted { pid: started.pid }),
    ))
}

/// A process that was started through the API; the youngest, where numbers were used again.
async fn find(client: &Client, pid: &str) -> Result<guest::ProcessInfo, Failure> {
    let all = known(client).await?;
    all.into_iter()
        .rev()
        .find(|process| pid.parse() == Ok(process.pid))
        .ok_or_else(|| {
            let pid: String = pid.chars().take(20).collect();
            Failure::new(
                ErrorCode::ProcessNotFound,
                format!("no process {pid} was started through the API"),
            )
        })
}

/// Follows a process that was started in the background: what is kept of its earlier output, then what it prints, and
/// its end. NDJSON, or server-sent events if `Accept` asks for them. It goes on when the client goes away.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/processes/{pid}/output", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), ("pid" = u32, Path, description = "The process")),
    responses(
    (status = 200, description = "Frames, one a line", body = String, content_type = "application/x-ndjson")
))]
pub async fn output(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
    headers: HeaderMap,
) -> Answer<Response> {
    let client = sandbox.agent().await?;
    let process = find(&client, &path.1).await?;
    let exec = client
        .by(agent_limits::start())
        .attach(guest::AttachRequest {
            process: process.process,
            replay: true,
            stdin: false,
            lossless: false,
        })
        .await
        .map_err(Error::agent("the process cannot be followed"))?;
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
    if process.state != guest::ProcessState::Running {
        return Err(Failure::new(
            ErrorCode::ProcessNotFound,
            format!("process {} has ended", process.pid),
        ));
    }
    client
        .by(agent_limits::answer())
        .signal(process.process, i32::from(request.signal), true)
        .await
        .map_err(Error::agent("the signal could not be sent"))?;
    Ok(StatusCode::NO_CONTENT)
}
