//! Routes that create, list, change and delete sandboxes.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use forkd_api::{
    BranchRequest, CreateSandboxes, ErrorCode, ForkRequest, InvalidLimits, Limits, MAX_CHILDREN,
    NetworkRequest, SandboxInfo, SandboxState, SnapshotInfo, UpdateSandbox,
};
use serde::Deserialize;
use utoipa::IntoParams;

use super::owned::{OwnedSandbox, check_visible};
use forkd_edge::auth::Actor;
use forkd_edge::errors::{Answer, Failure};
use forkd_edge::extract::{Body, Params};
use forkd_edge::idempotency;
use forkd_sandboxes::app::App;
use forkd_sandboxes::clock;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::branch::{self, Branched, parse_tag};
use forkd_sandboxes::ops::spawn::{self, CreateRequest};
use forkd_sandboxes::sandbox::{Ask, Changes, NetworkChange};
use forkd_sandboxes::state::OnExpiry;

/// The most labels one object has.
pub const MAX_LABELS: usize = 32;
/// The longest key of a label.
pub const MAX_LABEL_KEY: usize = 64;
/// The longest value of a label.
pub const MAX_LABEL_VALUE: usize = 256;
/// The most variables of an environment, and entries of metadata.
const MAX_ENV: usize = 256;
/// The most bytes of an environment, and of metadata.
const MAX_MAP_BYTES: usize = 64 << 10;
/// The most entries of one page.
const MAX_PAGE: usize = 1000;
/// The most of a console that is sent at once.
const MAX_LOG: u64 = 1 << 20;

/// Labels as they may be.
pub fn checked_labels(
    labels: BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, Failure> {
    let fits = |key: &str, value: &str| {
        (1..=MAX_LABEL_KEY).contains(&key.len())
            && value.len() <= MAX_LABEL_VALUE
            && !key.chars().any(char::is_control)
    };
    if labels.len() > MAX_LABELS || !labels.iter().all(|(key, value)| fits(key, value)) {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!(
                "at most {MAX_LABELS} labels, keys of 1 to {MAX_LABEL_KEY} bytes, values of at most {MAX_LABEL_VALUE}"
            ),
        ));
    }
    Ok(labels)
}

fn bytes(map: &BTreeMap<String, String>) -> usize {
    map.iter().map(|(key, value)| key.len() + value.len()).sum()
}

/// An environment as it may be.
pub fn checked_env(env: BTreeMap<String, String>) -> Result<BTreeMap<String, String>, Failure> {
    let names = env
        .keys()
        .all(|key| !key.is_empty() && !key.contains(['=', '\0']));
    let values = env.values().all(|value| !value.contains('\0'));
    if names && values && env.len() <= MAX_ENV && bytes(&env) <= MAX_MAP_BYTES {
        return Ok(env);
    }
    Err(Failure::new(
        ErrorCode::InvalidRequest,
        format!(
            "env has at most {MAX_ENV} variables and {MAX_MAP_BYTES} bytes; a name is not empty and holds no \"=\""
        ),
    ))
}

/// Metadata as it may be.
pub fn checked_metadata(
    metadata: BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, Failure> {
    if metadata.len() <= MAX_ENV && bytes(&metadata) <= MAX_MAP_BYTES {
        return Ok(metadata);
    }
    Err(Failure::new(
        ErrorCode::InvalidRequest,
        format!("metadata has at most {MAX_ENV} entries and {MAX_MAP_BYTES} bytes"),
    ))
}

/// Refuses numbers out of range. A limit that this host cannot keep is refused when the first process is taken.
fn checked_limits(limits: Result<Limits, InvalidLimits>) -> Result<Limits, Failure> {
    limits.map_err(|error| Failure::new(ErrorCode::InvalidRequest, error.to_string()))
}

/// Refuses a network policy that is invalid.
fn checked_network(request: NetworkRequest) -> Result<NetworkChange, Failure> {
    let policy = request.checked().map_err(Error::from)?;
    Ok(NetworkChange::Replace(policy))
}

fn checked_count(n: u32) -> Result<usize, Failure> {
    if (1..=MAX_CHILDREN).contains(&n) {
        Ok(n as usize)
    } else {
        Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("n is 1 to {MAX_CHILDREN}, not {n}"),
        ))
    }
}

/// When something that may live so long is to be deleted.
pub fn expiry(app: &App, seconds: Option<u64>) -> Result<Option<u64>, Failure> {
    let most = app.config.max_lifetime.map(|most| most.as_secs());
    let wanted = seconds.filter(|seconds| *seconds > 0);
    match (wanted, most) {
        (Some(wanted), Some(most)) if wanted > most => Err(Failure::new(
            ErrorCode::LimitReached,
            format!("a sandbox may live at most {most} s here"),
        )
        .with_status(StatusCode::BAD_REQUEST)),
        (wanted, most) => Ok(wanted
            .or(most)
            .map(|seconds| clock::unix().saturating_add(seconds))),
    }
}

/// Which sandboxes to list.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// Only those started from this snapshot.
    tag: Option<String>,
    /// Only those in this state.
    state: Option<SandboxState>,
    /// Only those with this label: `key` or `key=value`.
    label: Option<String>,
    /// At most so many; the header `x-next-after` says how to go on.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// Only those after this id.
    after: Option<String>,
}

impl ListParams {
    fn fits(&self, info: &SandboxInfo) -> bool {
        let label = self.label.as_deref().map(|label| {
            label
                .split_once('=')
                .map_or((label, None), |(k, v)| (k, Some(v)))
        });
        self.tag
            .as_ref()
            .is_none_or(|tag| *tag == info.snapshot_tag)
            && self.state.is_none_or(|state| state == info.state)
            && self.after.as_ref().is_none_or(|after| info.id > *after)
            && label.is_none_or(|(key, value)| {
                info.labels
                    .get(key)
                    .is_some_and(|found| value.is_none_or(|value| found == value))
            })
    }
}

/// Live sandboxes, the oldest first.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", params(ListParams), responses(
    (status = 200, description = "Those that match", body = Vec<SandboxInfo>)
))]
pub async fn list(
    State(app): State<Arc<App>>,
    actor: Actor,
    Params(params): Params<ListParams>,
) -> Answer<Response> {
    let limit = params.limit.unwrap_or(usize::MAX);
    if limit == 0 || (params.limit.is_some() && limit > MAX_PAGE) {
        return Err(Failure::new(
            ErrorCode::InvalidRequest,
            format!("limit is 1 to {MAX_PAGE}"),
        ));
    }
    let mut found: Vec<SandboxInfo> = app
        .sandboxes
        .list()
        .iter()
        .map(|sandbox| sandbox.info())
        .filter(|info| actor.owns(Some(&info.owner)) && params.fits(info))
        .take(limit.saturating_add(1))
        .collect();
    let more = found.len() > limit;
    found.truncate(limit);
    let next = found.last().filter(|_| more).map(|info| info.id.clone());
    let mut response = Json(found).into_response();
    if let Some(next) = next.and_then(|id| id.parse().ok()) {
        response.headers_mut().insert("x-next-after", next);
    }
    Ok(response)
}

/// Starts children of a snapshot. Answers when the agent of each has answered; one that failed is in the
/// list with its error, and if all failed the answer is that error.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = CreateSandboxes,
    params(("idempotency-key" = Option<String>, Header, min_length = 1, max_length = 128, description = "Makes a repeated request harmless")), responses(
    (status = 201, description = "The children", body = Vec<SandboxInfo>),
    (status = 202, description = "They are being started; asked for with \"wait\": false", body = Vec<SandboxInfo>)
))]
pub async fn start(
    State(app): State<Arc<App>>,
    actor: Actor,
    headers: HeaderMap,
    Body(request): Body<CreateSandboxes>,
) -> Answer<Response> {
    let limits = checked_limits(request.checked_limits())?;
    let wish = CreateRequest {
        tag: parse_tag(&request.snapshot_tag)?,
        count: checked_count(request.n)?,
        owner: actor.owner.clone(),
        expires_at_unix: expiry(&app, request.timeout_secs)?,
        on_expiry: OnExpiry::Delete,
        memory_limit_mib: limits.memory_mib,
        limits: limits.into(),
        network: super::network::policy(&app, request.network.as_ref())?,
        labels: checked_labels(request.labels.clone())?,
        env: checked_env(request.env.clone())?,
        metadata: checked_metadata(request.metadata.clone())?,
        workspace: None,
        id: None,
        ports: super::ports::wished(&app, &request.ports, request.n as usize)?,
        per_child_netns: request.per_child_netns,
        volumes: super::volumes::wishes(&app, &actor, &request.volumes)?,
    };
    check_visible(&app, &actor, &wish.tag)?;
    let wait = request.wait;
    let work = {
        let app = Arc::clone(&app);
        async move {
            if wait {
                let infos = spawn::create(&app, wish).await?;
                return Ok((StatusCode::CREATED, serde_json::to_value(infos)));
            }
            let children = spawn::start(&app, wish).await?;
            let infos: Vec<_> = children.iter().map(|child| child.info()).collect();
            Ok((StatusCode::ACCEPTED, serde_json::to_value(infos)))
        }
    };
    idempotency::once(&app.db, &actor, &headers, "create", &request, work).await
}

/// Describes one sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The sandbox", body = SandboxInfo)
))]
pub async fn get(OwnedSandbox(sandbox): OwnedSandbox) -> Answer<Json<SandboxInfo>> {
    Ok(Json(sandbox.info()))
}

/// Changes when a sandbox expires, its labels, its limits, or its network policy.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}", tag = "sandboxes", request_body = UpdateSandbox,
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "The sandbox", body = SandboxInfo)
))]
pub async fn update(
    State(app): State<Arc<App>>,
    OwnedSandbox(sandbox): OwnedSandbox,
    Body(request): Body<UpdateSandbox>,
) -> Answer<Json<SandboxInfo>> {
    let expires = match request.timeout_secs {
        None => None,
        Some(seconds) => Some(expiry(&app, Some(seconds))?),
    };
    let limits = match request.limits {
        None => None,
        Some(limits) => {
            let limits = checked_limits(limits.checked())?;
            Some((limits.memory_mib, limits.into()))
        }
    };
    let changes = Changes {
        expires_at_unix: expires,
        labels: request.labels.map(checked_labels).transpose()?,
        limits,
        network: request.network.map(checked_network).transpose()?,
        port: None,
        committed: None,
    };
    Ok(Json(sandbox.change(changes).await?))
}

/// Ends a sandbox. Answers when nothing of it is left.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 204, description = "It is gone")
))]
pub async fn delete(OwnedSandbox(sandbox): OwnedSandbox) -> Answer<StatusCode> {
    sandbox.stop.cancel();
    sandbox.gone.cancelled().await;
    Ok(StatusCode::NO_CONTENT)
}

/// Cuts a running sandbox into a new snapshot; the sandbox goes on.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/branch", tag = "sandboxes", request_body = BranchRequest,
    params(("id" = String, Path, description = "Its id"),
        ("idempotency-key" = Option<String>, Header, min_length = 1, max_length = 128, description = "Makes a repeated request harmless")), responses(
    (status = 201, description = "The snapshot is durable", body = SnapshotInfo),
    (status = 202, description = "The sandbox runs again, the snapshot is being written", body = SnapshotInfo)
))]
pub async fn branch(
    State(app): State<Arc<App>>,
    actor: Actor,
    OwnedSandbox(sandbox): OwnedSandbox,
    headers: HeaderMap,
    Body(request): Body<BranchRequest>,
) -> Answer<Response> {
    let wish = request.clone().try_into()?;
    let id = sandbox.id.clone();
    let what = format!("branch {id}");
    let work = {
        let app = Arc::clone(&app);
        async move {
            Ok(match branch::branch(&app, &id, wish).await? {
                Branched::Ready(info) => (StatusCode::CREATED, serde_json::to_value(info)),
                Branched::Writing(info) => (StatusCode::ACCEPTED, serde_json::to_value(info)),
            })
        }
    };
    idempotency::once(&app.db, &actor, &headers, &what, &request, work).await
}

/// Forks a running sandbox into live children without naming a snapshot. Children have the environment, the metadata and,
/// unless the request names one, the network policy of their source. Connections of the source go on; a child finds its
/// copies of them reset.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", tag = "sandboxes", request_body = ForkRequest,
    params(("id" = String, Path, description = "Its id"),
        ("idempotency-key" = Option<String>, Header, min_length = 1, max_length = 128, description = "Makes a repeated request harmless")), responses(
    (status = 201, description = "The children", body = Vec<SandboxInfo>)
))]
pub async fn fork(
    State(app): State<Arc<App>>,
    actor: Actor,
    OwnedSandbox(sandbox): OwnedSandbox,
    headers: HeaderMap,
    Body(request): Body<ForkRequest>,
) -> Answer<Response> {
    let wish = forkd_sandboxes::ops::fork::Fork {
        count: checked_count(request.n)?,
        owner: actor.owner.clone(),
        expires_at_unix: expiry(&app, request.timeout_secs)?,
        on_expiry: OnExpiry::Delete,
        labels: checked_labels(request.labels.clone())?,
        freeze: request.freeze,
        network: request
            .network
            .as_ref()
            .map(NetworkRequest::checked)
            .transpose()
            .map_err(Error::from)?,
    };
    let id = sandbox.id.clone();
    let what = format!("fork {id}");
    let work = {
        let app = Arc::clone(&app);
        async move {
            let infos = forkd_sandboxes::ops::fork::fork(&app, &id, wish).await?;
            Ok((StatusCode::CREATED, serde_json::to_value(infos)))
        }
    };
    idempotency::once(&app.db, &actor, &headers, &what, &request, work).await
}

/// Stops a sandbox's vCPUs.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "It stands still", body = SandboxInfo)
))]
pub async fn pause(OwnedSandbox(sandbox): OwnedSandbox) -> Answer<Json<SandboxInfo>> {
    sandbox.answer(Ask::Pause).await?;
    Ok(Json(sandbox.info()))
}

/// Lets a paused sandbox go on.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", tag = "sandboxes",
    params(("id" = String, Path, description = "Its id")), responses(
    (status = 200, description = "It runs", body = SandboxInfo)
))]
pub async fn resume(OwnedSandbox(sandbox): OwnedSandbox) -> Answer<Json<SandboxInfo>> {
    sandbox.answer(Ask::Resume).await?;
    Ok(Json(sandbox.info()))
}

/// How much of the console to send.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct LogParams {
    /// At most so many bytes from the end.
    #[param(maximum = 1048576)]
    tail: Option<u64>,
}

/// Console output of a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", tag = "guest",
    params(("id" = String, Path, description = "Its id"), LogParams), responses(
    (status = 200, description = "The end of the console", body = String, content_type = "text/plain")
))]
pub async fn logs(
    State(app): State<Arc<App>>,
    OwnedSandbox(sandbox): OwnedSandbox,
    Params(params): Params<LogParams>,
) -> Answer<Response> {
    use std::os::unix::fs::FileExt;
    let most = params.tail.unwrap_or(MAX_LOG).min(MAX_LOG);
    let bytes = app
        .blocking(move |_| {
            let path = &sandbox.console;
            let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
            let len = file.metadata().map_err(Error::io("read", path))?.len();
            let mut bytes = vec![0; usize::try_from(len.min(most)).unwrap_or(0)];
            file.read_exact_at(&mut bytes, len - len.min(most))
                .map_err(Error::io("read", path))?;
            Ok(bytes)
        })
        .await?;
    Ok(([("content-type", "text/plain; charset=utf-8")], bytes).into_response())
}
