//! Routes that list, start, restart, interrupt and stop warm interpreters. `eval` names the one it wants.

use axum::Json;
use axum::extract::Path;
use axum::http::StatusCode;
use forkd_api::{ErrorCode, InterpreterInfo, StartInterpreter};
use forkd_guest_proto as guest;

use super::owned::OwnedSandbox;
use crate::guest::exec::environment;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::Body;
use forkd_sandboxes::agent_limits;
use forkd_sandboxes::error::Error;

/// The longest name.
const MAX_NAME: usize = 64;
/// How long an interpreter may take to start.
const START_SECS: u64 = 120;

fn shown(info: guest::InterpInfo) -> InterpreterInfo {
    InterpreterInfo {
        ready: matches!(
            info.state,
            guest::InterpState::Ready | guest::InterpState::Busy
        ),
        name: info.name,
        language: info.language,
        version: info.version,
        pid: info.pid,
        restarts: info.restarts,
        calls: info.calls,
    }
}

/// Interpreters of a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/interpreters", tag = "guest",
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 200, description = "The interpreters", body = Vec<InterpreterInfo>)
))]
pub async fn list(OwnedSandbox(sandbox): OwnedSandbox) -> Answer<Json<Vec<InterpreterInfo>>> {
    let client = sandbox.agent().await?;
    let found = client
        .by(agent_limits::answer())
        .interp_list()
        .await
        .map_err(Error::agent("the interpreters cannot be listed"))?;
    Ok(Json(found.into_iter().map(shown).collect()))
}

/// Starts an interpreter. One that runs under the same name is left as it is.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/interpreters", tag = "guest", request_body = StartInterpreter,
    params(("id" = String, Path, description = "The sandbox")), responses(
    (status = 201, description = "It is ready", body = InterpreterInfo)
))]
pub async fn start(
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<StartInterpreter>,
) -> Answer<(StatusCode, Json<InterpreterInfo>)> {
    let name = request.name.as_deref().unwrap_or(&request.language);
    if name.is_empty() || name.len() > MAX_NAME || name.contains('\0') {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("an interpreter has a name of 1 to {MAX_NAME} bytes"),
        ));
    }
    let wish = guest::InterpStart {
        name: request.name,
        language: request.language,
        env: environment(&sandbox.record().environment(), &request.env),
        cwd: request.cwd,
        user: request.user,
        timeout_ms: Some(START_SECS * 1000),
        ..guest::InterpStart::default()
    };
    let client = sandbox.agent().await?;
    let info = client
        .by(agent_limits::command(START_SECS))
        .interp_start(wish)
        .await
        .map_err(Error::agent("the interpreter could not be started"))?;
    Ok((StatusCode::CREATED, Json(shown(info))))
}

/// Replaces an interpreter by a new one of the same name.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/interpreters/{name}/restart", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), ("name" = String, Path, description = "The interpreter")), responses(
    (status = 200, description = "It is ready", body = InterpreterInfo)
))]
pub async fn restart(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
) -> Answer<Json<InterpreterInfo>> {
    let client = sandbox.agent().await?;
    let info = client
        .by(agent_limits::command(START_SECS))
        .interp_restart(&path.1)
        .await
        .map_err(Error::agent("the interpreter could not be restarted"))?;
    Ok(Json(shown(info)))
}

/// Interrupts the call that an interpreter is in.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/interpreters/{name}/interrupt", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), ("name" = String, Path, description = "The interpreter")), responses(
    (status = 204, description = "It is interrupted")
))]
pub async fn interrupt(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
) -> Answer<StatusCode> {
    let client = sandbox.agent().await?;
    client
        .by(agent_limits::answer())
        .interp_interrupt(&path.1)
        .await
        .map_err(Error::agent("the interpreter could not be interrupted"))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Stops an interpreter and forgets its state.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/interpreters/{name}", tag = "guest",
    params(("id" = String, Path, description = "The sandbox"), ("name" = String, Path, description = "The interpreter")), responses(
    (status = 204, description = "It is gone")
))]
pub async fn stop(
    OwnedSandbox(sandbox): OwnedSandbox,
    Path(path): Path<(String, String)>,
) -> Answer<StatusCode> {
    let client = sandbox.agent().await?;
    client
        .by(agent_limits::answer())
        .interp_stop(&path.1)
        .await
        .map_err(Error::agent("the interpreter could not be stopped"))?;
    Ok(StatusCode::NO_CONTENT)
}
