//! Routes that end, extend, pause and resume sandboxes.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::pause as paused;
use forkd_sandboxes::sandbox::{Ask, Changes, Phase, SandboxHandle};
use forkd_sandboxes::trace;

use super::Sent;
use super::owned::Owned;
use super::sandboxes::{expiry, shown, template};
use super::wire::Timed;
use crate::e2b::error::{Answer, Refusal};
use crate::e2b::state::E2b;

/// Seconds that a sandbox lives after a connect that gives no timeout.
const TIMEOUT: u64 = 300;
/// The most seconds of a refresh.
const MAX_REFRESH: u64 = 3600;

/// Ends a sandbox, running or paused.
pub async fn kill(State(e2b): State<Arc<E2b>>, owned: Owned) -> Answer<StatusCode> {
    let (app, id) = (Arc::clone(&e2b.app), owned.id().clone());
    let work = trace::spawn(async move { paused::forget(&app, &id).await });
    work.await.map_err(|_| Error::Task)??;
    Ok(StatusCode::NO_CONTENT)
}

/// Sets when a live sandbox expires.
async fn set_expiry(sandbox: &SandboxHandle, expires: u64) -> Answer<()> {
    let changes = Changes {
        expires_at_unix: Some(Some(expires)),
        ..Changes::default()
    };
    sandbox.change(changes).await?;
    Ok(())
}

/// Sets the time that is left, longer or shorter.
pub async fn timeout(
    State(e2b): State<Arc<E2b>>,
    owned: Owned,
    Sent(request): Sent<Timed>,
) -> Answer<StatusCode> {
    let seconds = request
        .timeout
        .ok_or_else(|| Refusal::bad("timeout is missing"))?;
    let sandbox = owned.live()?;
    set_expiry(&sandbox, expiry(&e2b, seconds)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Extends the time that is left, if it is shorter than asked for.
async fn extend(e2b: &E2b, sandbox: &SandboxHandle, seconds: u64) -> Answer<()> {
    let wanted = expiry(e2b, seconds)?;
    match sandbox.record().expires_at_unix {
        Some(expires) if expires < wanted => set_expiry(sandbox, wanted).await,
        _ => Ok(()),
    }
}

/// Extends the time that is left.
pub async fn refresh(
    State(e2b): State<Arc<E2b>>,
    owned: Owned,
    Sent(request): Sent<Timed>,
) -> Answer<StatusCode> {
    let seconds = request.duration.unwrap_or(15).min(MAX_REFRESH);
    let sandbox = owned.live()?;
    extend(&e2b, &sandbox, seconds).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn check_memory(request: &Timed) -> Answer<()> {
    if request.memory == Some(false) {
        return Err(Refusal::bad(
            "a pause or resume without memory is not supported by forkd",
        ));
    }
    Ok(())
}

/// Writes a sandbox to disk and ends its VM. Its ID and its token stay.
pub async fn pause(
    State(e2b): State<Arc<E2b>>,
    owned: Owned,
    Sent(request): Sent<Timed>,
) -> Answer<StatusCode> {
    check_memory(&request)?;
    let sandbox = owned.live()?;
    if sandbox.phase() == Phase::Paused {
        return Err(Refusal::new(
            StatusCode::CONFLICT,
            format!("sandbox {} is paused", sandbox.id),
        ));
    }
    let (app, id) = (Arc::clone(&e2b.app), sandbox.id.clone());
    let work = trace::spawn(async move { paused::pause(&app, &id).await });
    work.await.map_err(|_| Error::Task)??;
    Ok(StatusCode::NO_CONTENT)
}

/// A sandbox that runs, and whether it was resumed for that.
async fn running(e2b: &Arc<E2b>, owned: Owned, expires: u64) -> Answer<(Arc<SandboxHandle>, bool)> {
    match owned {
        Owned::Live(sandbox) if sandbox.phase() == Phase::Paused => {
            sandbox.answer(Ask::Resume).await?;
            set_expiry(&sandbox, expires).await?;
            Ok((sandbox, true))
        }
        Owned::Live(sandbox) => {
            sandbox.launched().await;
            Ok((sandbox, false))
        }
        Owned::Paused(_, id) => {
            let app = Arc::clone(&e2b.app);
            let work = trace::spawn(async move { paused::resume(&app, &id, Some(expires)).await });
            let sandbox = work.await.map_err(|_| Error::Task)??;
            Ok((sandbox, true))
        }
    }
}

/// Makes sure that a sandbox runs, and extends its time. A paused one is resumed.
pub async fn connect(
    State(e2b): State<Arc<E2b>>,
    owned: Owned,
    Sent(request): Sent<Timed>,
) -> Answer<Response> {
    check_memory(&request)?;
    let seconds = request.timeout.unwrap_or(TIMEOUT);
    let expires = expiry(&e2b, seconds)?;
    let (sandbox, resumed) = running(&e2b, owned, expires).await?;
    if !resumed {
        extend(&e2b, &sandbox, seconds).await?;
    }
    let status = if resumed {
        StatusCode::CREATED
    } else {
        StatusCode::OK
    };
    Ok((status, Json(as_connected(&e2b, &sandbox))).into_response())
}

fn as_connected(e2b: &E2b, sandbox: &SandboxHandle) -> super::wire::Sandbox {
    let record = sandbox.record();
    let template = template(&record.labels, record.tag.as_str());
    shown(e2b, &sandbox.id, template)
}

/// Resumes a paused sandbox; one that runs is refused.
pub async fn resume(
    State(e2b): State<Arc<E2b>>,
    owned: Owned,
    Sent(request): Sent<Timed>,
) -> Answer<Response> {
    check_memory(&request)?;
    let expires = expiry(&e2b, request.timeout.unwrap_or(TIMEOUT))?;
    let id = owned.id().clone();
    let (sandbox, resumed) = running(&e2b, owned, expires).await?;
    if !resumed {
        return Err(Refusal::new(
            StatusCode::CONFLICT,
            format!("sandbox {id} is running"),
        ));
    }
    Ok((StatusCode::CREATED, Json(as_connected(&e2b, &sandbox))).into_response())
}
