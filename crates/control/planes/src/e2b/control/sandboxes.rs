//! Routes that create, show and fork sandboxes.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use forkd_edge::errors::Failure;
use forkd_edge::idempotency;
use forkd_sandboxes::clock;
use forkd_sandboxes::error::Error;
use forkd_sandboxes::ops::fork::{self, Fork};
use forkd_sandboxes::ops::spawn::{self, CreateRequest};
use forkd_sandboxes::sandbox::{Phase, SandboxHandle};
use forkd_sandboxes::state::{Access, OnExpiry, PortsRecord, SandboxRecord, WorkspaceRecord};
use forkd_types::SandboxId;
use serde_json::{Value, json};

use super::Sent;
use super::network;
use super::owned::{Caller, Owned};
use super::templates;
use super::wire::{Detail, Lifecycle, NewSandbox, Sandbox, State as Shown, Timed};
use crate::e2b::ENVD_VERSION;
use crate::e2b::error::{Answer, Refusal};
use crate::e2b::state::{E2b, labels};
use crate::e2b::text;
use crate::ports::TokenKind;
use crate::rest::sandboxes::{checked_env, checked_metadata};

/// The `clientID` of every sandbox: the protocol wants one.
const CLIENT: &str = "forkd";
/// Seconds that a sandbox lives unless the request says otherwise.
const TIMEOUT: u64 = 300;
/// The same for the first version of the route, and for forks.
const TIMEOUT_V1: u64 = 15;
/// The most forks of one request.
const MAX_FORKS: u32 = 20;
/// The most of a console that is sent at once.
const MAX_LOG: u64 = 256 << 10;

/// When a sandbox expires that may live this many seconds from now.
pub fn expiry(e2b: &E2b, seconds: u64) -> Answer<u64> {
    let most = e2b.app.config.max_lifetime.map(|most| most.as_secs());
    if let Some(most) = most.filter(|most| seconds > *most) {
        return Err(Refusal::bad(format!(
            "a sandbox may live at most {most} s here"
        )));
    }
    Ok(clock::unix().saturating_add(seconds))
}

/// A sandbox as create, connect and fork return it.
pub fn shown(e2b: &E2b, id: &SandboxId, template: String) -> Sandbox {
    Sandbox {
        template_id: template,
        sandbox_id: id.to_string(),
        client_id: CLIENT,
        envd_version: ENVD_VERSION,
        envd_access_token: e2b.token(TokenKind::Envd, id),
        traffic_access_token: e2b.token(TokenKind::Traffic, id),
        domain: e2b.config.domain.as_ref().map(ToString::to_string),
    }
}

/// The template that a sandbox was started from.
pub fn template(labels: &BTreeMap<String, String>, tag: &str) -> String {
    labels
        .get(labels::TEMPLATE)
        .map_or_else(|| tag.to_owned(), Clone::clone)
}

/// The start of a sandbox; in whole seconds if it was not started through this plane.
fn started_ms(labels: &BTreeMap<String, String>, created_unix: u64) -> u64 {
    let kept = labels.get(labels::STARTED);
    kept.and_then(|text| text.parse().ok())
        .unwrap_or(created_unix.saturating_mul(1000))
}

fn lifecycle(on_expiry: OnExpiry, labels: &BTreeMap<String, String>) -> Lifecycle {
    Lifecycle {
        auto_resume: labels.contains_key(labels::AUTO_RESUME),
        on_timeout: match on_expiry {
            OnExpiry::Delete => "kill",
            OnExpiry::Suspend => "pause",
        },
    }
}

/// A live sandbox as lists show it.
pub fn live_detail(record: &SandboxRecord, phase: Phase) -> Detail {
    let template = template(&record.labels, record.tag.as_str());
    let started_ms = started_ms(&record.labels, record.created_at_unix);
    Detail {
        alias: template.clone(),
        template_id: template,
        sandbox_id: record.id.to_string(),
        client_id: CLIENT,
        started_at: text::time_ms(started_ms),
        end_at: text::time(record.expires_at_unix.unwrap_or(u64::MAX)),
        envd_version: ENVD_VERSION,
        cpu_count: u32::from(record.vcpus),
        memory_mb: record.memory_mib,
        disk_size_mb: record.disks.first().map_or(0, |disk| disk.base.bytes >> 20),
        state: match phase {
            Phase::Paused => Shown::Paused,
            _ => Shown::Running,
        },
        metadata: record.metadata.clone(),
        lifecycle: Some(lifecycle(record.on_expiry, &record.labels)),
        envd_access_token: None,
        domain: None,
        started_ms,
    }
}

/// A paused sandbox as lists show it.
pub fn paused_detail(record: &WorkspaceRecord) -> Option<Detail> {
    let kept = record.of_sandbox.as_deref()?;
    let template = template(&kept.labels, record.source.as_str());
    let started_ms = started_ms(&kept.labels, record.created_at_unix);
    Some(Detail {
        alias: template.clone(),
        template_id: template,
        sandbox_id: record.sandbox.as_ref()?.to_string(),
        client_id: CLIENT,
        started_at: text::time_ms(started_ms),
        end_at: text::time(record.last_active_unix),
        envd_version: ENVD_VERSION,
        cpu_count: u32::from(kept.vcpus),
        memory_mb: kept.memory_mib,
        disk_size_mb: kept.disk_bytes >> 20,
        state: Shown::Paused,
        metadata: kept.metadata.clone(),
        lifecycle: Some(lifecycle(kept.on_expiry, &kept.labels)),
        envd_access_token: None,
        domain: None,
        started_ms,
    })
}

/// Starts a sandbox, and lets it live for five minutes unless the request says otherwise.
pub async fn create(
    State(e2b): State<Arc<E2b>>,
    caller: Caller,
    headers: HeaderMap,
    Sent(request): Sent<NewSandbox>,
) -> Answer<Response> {
    start(&e2b, caller, headers, request, TIMEOUT).await
}

/// The same with the shorter time of the first version.
pub async fn create_v1(
    State(e2b): State<Arc<E2b>>,
    caller: Caller,
    headers: HeaderMap,
    Sent(request): Sent<NewSandbox>,
) -> Answer<Response> {
    start(&e2b, caller, headers, request, TIMEOUT_V1).await
}

/// Refuses fields that this daemon cannot honour.
fn check_supported(request: &NewSandbox) -> Answer<()> {
    let refuse = |what: &str| Err(Refusal::bad(format!("{what} is not supported by forkd")));
    if request.auto_pause == Some(true) && request.auto_pause_memory == Some(false) {
        return refuse("a pause without memory");
    }
    if request.iam.as_ref().is_some_and(|iam| !iam.is_null()) {
        return refuse("iam");
    }
    if request
        .volume_mounts
        .as_ref()
        .is_some_and(|all| !all.is_empty())
    {
        return refuse("volumeMounts");
    }
    Ok(())
}

async fn start(
    e2b: &Arc<E2b>,
    Caller(actor): Caller,
    headers: HeaderMap,
    request: NewSandbox,
    default_timeout: u64,
) -> Answer<Response> {
    check_supported(&request)?;
    let template = request.template_id.as_deref().unwrap_or("base");
    let tag = templates::resolve(e2b, &actor, template)?;
    let seconds = request.timeout.unwrap_or(default_timeout);
    let mut labels = BTreeMap::from([
        (labels::TEMPLATE.to_owned(), template.to_owned()),
        (labels::STARTED.to_owned(), clock::unix_ms().to_string()),
    ]);
    if request.auto_resume.is_some_and(|auto| auto.enabled) {
        labels.insert(labels::AUTO_RESUME.into(), "true".into());
    }
    let network = request.network.as_ref();
    let policy = network::policy(&e2b.app, network, request.allow_internet_access)?;
    let ports = PortsRecord {
        access: match network.and_then(|network| network.allow_public_traffic) {
            Some(false) => Access::Token,
            _ => Access::Public,
        },
        ..PortsRecord::default()
    };
    let wish = CreateRequest {
        tag,
        count: 1,
        owner: actor.owner.clone(),
        expires_at_unix: Some(expiry(e2b, seconds)?),
        on_expiry: if request.auto_pause == Some(true) {
            OnExpiry::Suspend
        } else {
            OnExpiry::Delete
        },
        memory_limit_mib: None,
        limits: Default::default(),
        network: policy,
        labels,
        env: checked_env(request.env_vars.clone().unwrap_or_default())?,
        metadata: checked_metadata(request.metadata.clone().unwrap_or_default())?,
        workspace: None,
        id: None,
        ports,
        per_child_netns: false,
        volumes: Vec::new(),
    };
    let work = {
        let (e2b, template) = (Arc::clone(e2b), template.to_owned());
        async move {
            let made = spawn::create(&e2b.app, wish).await?;
            let id = made.first().and_then(|info| info.id.parse().ok());
            let id: SandboxId = id.ok_or(Error::Task)?;
            let sandbox = shown(&e2b, &id, template);
            Ok((StatusCode::CREATED, serde_json::to_value(sandbox)))
        }
    };
    Ok(idempotency::once(&e2b.app.db, &actor, &headers, "e2b create", &request, work).await?)
}

/// Describes one sandbox of the caller.
pub async fn get(State(e2b): State<Arc<E2b>>, owned: Owned) -> Answer<Json<Detail>> {
    let id = owned.id().clone();
    let detail = match owned {
        Owned::Live(sandbox) => live_detail(&sandbox.record(), sandbox.phase()),
        Owned::Paused(record, id) => {
            paused_detail(&record).ok_or_else(|| Refusal::no_sandbox(id.as_str()))?
        }
    };
    Ok(Json(Detail {
        envd_access_token: Some(e2b.token(TokenKind::Envd, &id)),
        domain: e2b.config.domain.as_ref().map(ToString::to_string),
        ..detail
    }))
}

/// Forks a running sandbox. Each fork is a sandbox or an error of its own.
pub async fn fork(
    State(e2b): State<Arc<E2b>>,
    Caller(actor): Caller,
    owned: Owned,
    Sent(request): Sent<Timed>,
) -> Answer<(StatusCode, Json<Vec<Value>>)> {
    let sandbox = owned.live()?;
    let count = request.count.unwrap_or(1);
    if !(1..=MAX_FORKS).contains(&count) {
        return Err(Refusal::bad(format!("count is 1 to {MAX_FORKS}")));
    }
    let record = sandbox.record();
    let mut labels = record.labels.clone();
    labels.insert(labels::STARTED.to_owned(), clock::unix_ms().to_string());
    let wish = Fork {
        count: count as usize,
        owner: actor.owner,
        expires_at_unix: Some(expiry(&e2b, request.timeout.unwrap_or(TIMEOUT_V1))?),
        on_expiry: record.on_expiry,
        labels,
        freeze: false,
        network: None,
    };
    let template = template(&record.labels, record.tag.as_str());
    let app = Arc::clone(&e2b.app);
    let id = sandbox.id.clone();
    let work = forkd_sandboxes::trace::spawn(async move { fork::fork(&app, &id, wish).await });
    let forks = work.await.map_err(|_| Error::Task)??;
    let answers = forks
        .into_iter()
        .map(|info| match (info.error, info.id.parse()) {
            (None, Ok(id)) => json!({"sandbox": shown(&e2b, &id, template.clone())}),
            (error, _) => {
                let message = error.map_or_else(|| "the fork failed".to_owned(), |body| body.error);
                json!({"error": {"code": 500, "message": message}})
            }
        });
    Ok((StatusCode::CREATED, Json(answers.collect())))
}

async fn console(e2b: &Arc<E2b>, sandbox: &SandboxHandle) -> Answer<Vec<String>> {
    let path = sandbox.console.clone();
    let bytes = e2b
        .app
        .blocking(move |_| {
            use std::io::{Read, Seek, SeekFrom};
            let read = || -> std::io::Result<Vec<u8>> {
                let mut file = std::fs::File::open(&path)?;
                let length = file.metadata()?.len();
                file.seek(SeekFrom::Start(length.saturating_sub(MAX_LOG)))?;
                let mut bytes = Vec::new();
                file.take(MAX_LOG).read_to_end(&mut bytes)?;
                Ok(bytes)
            };
            Ok(read().unwrap_or_default())
        })
        .await?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.lines().map(str::to_owned).collect())
}

/// The console of a sandbox as log lines. The console has no times, so all have that of the start.
pub async fn logs(State(e2b): State<Arc<E2b>>, owned: Owned) -> Answer<Json<Value>> {
    let sandbox = owned.live()?;
    let at = text::time(sandbox.record().created_at_unix);
    let lines = console(&e2b, &sandbox).await?;
    let logs: Vec<Value> = lines
        .iter()
        .map(|line| json!({"timestamp": at, "line": line}))
        .collect();
    let entries: Vec<Value> = lines
        .iter()
        .map(|line| json!({"timestamp": at, "message": line, "level": "info", "fields": {}}))
        .collect();
    Ok(Json(json!({"logs": logs, "logEntries": entries})))
}

/// The same in the form of the second version.
pub async fn logs_v2(State(e2b): State<Arc<E2b>>, owned: Owned) -> Answer<Json<Value>> {
    let sandbox = owned.live()?;
    let at = text::time(sandbox.record().created_at_unix);
    let lines = console(&e2b, &sandbox).await?;
    let entries: Vec<Value> = lines
        .iter()
        .map(|line| json!({"timestamp": at, "message": line, "level": "info", "fields": {}}))
        .collect();
    Ok(Json(json!({"logs": entries})))
}

/// A refusal as the gate and shared code make it.
impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::new(forkd_api::ErrorCode::InvalidRequest, refusal.message).with_status(refusal.status)
    }
}
