//! Sandboxes that are paused to disk under their own ID.
//!
//! [`pause`] writes the state of a running sandbox down and ends its VM; [`resume`] starts it again with the same ID,
//! environment, metadata and limits. Between the two the sandbox is a suspended workspace whose name is the ID, so a
//! paused sandbox survives a restart of the daemon and an operator finds it with `forkd workspace list`.
//!
//! ```text
//! sandbox ──pause──► suspended workspace of the same name ──resume──► sandbox
//!                                   └──────────forget──────► nothing
//! ```

use std::sync::Arc;

use forkd_api::ErrorCode;
use forkd_types::{SandboxId, Tag};

use super::spawn;
use super::workspaces;
use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::sandbox::{Phase, SandboxHandle};
use crate::state::{DbError, RECORD_VERSION, SandboxRecord, SuspendedSandbox, WorkspaceRecord};

/// Layers of memory above which a pause writes all of it: a resume opens one file for each layer.
const MAX_LAYERS: usize = 16;

/// The workspace that a paused sandbox is.
fn name(id: &SandboxId) -> Result<Tag, Error> {
    id.as_str().parse().map_err(|_| Error::Task)
}

fn not_found(id: &SandboxId) -> Error {
    Error::NoSandbox { id: id.clone() }
}

/// The workspace of a sandbox. One that cannot be read exists for operators of workspaces only, as a failed sandbox does.
async fn stored(app: &Arc<App>, id: &SandboxId) -> Result<Option<WorkspaceRecord>, Error> {
    match app.db.workspace(name(id)?).await {
        Err(DbError::Unreadable { .. }) => Ok(None),
        found => Ok(found?),
    }
}

/// The sandbox, if it is paused.
pub async fn find(app: &Arc<App>, id: &SandboxId) -> Result<Option<WorkspaceRecord>, Error> {
    Ok(stored(app, id).await?.filter(is_paused))
}

/// Every paused sandbox.
pub async fn list(app: &Arc<App>) -> Result<Vec<WorkspaceRecord>, Error> {
    let mut all = app.db.workspaces().await?.readable;
    all.retain(is_paused);
    Ok(all)
}

fn is_paused(record: &WorkspaceRecord) -> bool {
    record.suspended && record.of_sandbox.is_some()
}

fn settings(record: SandboxRecord) -> SuspendedSandbox {
    SuspendedSandbox {
        on_expiry: record.on_expiry,
        limits: record.limits,
        labels: record.labels,
        env: record.env,
        metadata: record.metadata,
        memory_mib: record.memory_mib,
        vcpus: record.vcpus,
        disk_bytes: record.disks.first().map_or(0, |disk| disk.base.bytes),
        ports: record.ports,
    }
}

/// Writes the state of a running sandbox down and ends its VM.
pub async fn pause(app: &Arc<App>, id: &SandboxId) -> Result<(), Error> {
    app.check_open()?;
    let name = name(id)?;
    let _one = app.workspace_locks.hold(&name).await;
    let sandbox = app.sandboxes.get(id)?;
    if !sandbox.phase().answers() {
        return Err(sandbox.not_running());
    }
    let record = sandbox.record();
    if record.workspace.is_some() {
        return Err(Error::hinted(
            ErrorCode::WrongState,
            format!("sandbox {id} belongs to a workspace"),
            "suspend the workspace instead",
        ));
    }
    let earlier = app.db.workspace(name.clone()).await?;
    if earlier.is_some_and(|earlier| earlier.sandbox.as_ref() != Some(id)) {
        return Err(Error::refused(
            ErrorCode::AlreadyExists,
            format!("there is a workspace of the name {name}"),
        ));
    }
    let now = clock::unix();
    let diff = record.builds_on().0.layers.len() <= MAX_LAYERS;
    let workspace = WorkspaceRecord {
        version: RECORD_VERSION,
        name: name.clone(),
        id: format!("ws-{}", id.as_str().chars().take(16).collect::<String>()),
        owner: record.owner.clone(),
        source: record.tag.clone(),
        state_tag: None,
        sandbox: Some(id.clone()),
        suspended: false,
        created_at_unix: record.created_at_unix,
        last_active_unix: now,
        per_child_netns: false,
        memory_limit_mib: record.memory_limit_mib,
        last_branch_memory_path: None,
        network: Some(record.network.clone()),
        of_sandbox: Some(Box::new(settings(record))),
    };
    // Stored only with its state, so a pause that fails leaves the sandbox as it was.
    workspaces::suspend_held(app, workspace, diff)
        .await
        .map(drop)
}

/// Starts a paused sandbox again. The sandbox is ready when this returns.
pub async fn resume(
    app: &Arc<App>,
    id: &SandboxId,
    expires_at_unix: Option<u64>,
) -> Result<Arc<SandboxHandle>, Error> {
    let name = name(id)?;
    let _one = app.workspace_locks.hold(&name).await;
    let Some(record) = find(app, id).await? else {
        // Another request may have resumed it while this one waited.
        let sandbox = app.sandboxes.get(id)?;
        sandbox.launched().await;
        return match sandbox.phase() {
            Phase::Failed => Err(sandbox.not_running()),
            _ => Ok(sandbox),
        };
    };
    let state = record.state_tag.clone().ok_or_else(|| not_found(id))?;
    let mut request = workspaces::request(app, &record, state.clone());
    request.expires_at_unix = expires_at_unix;
    let children = spawn::start(app, request).await?;
    spawn::ready(&children).await?;
    // The VM holds its content by itself from now on.
    app.db.delete_workspace(name).await?;
    workspaces::tidy(app, state).await;
    children.into_iter().next().ok_or(Error::Task)
}

/// Ends a sandbox, whether it runs or is paused. Returns when nothing of it is left.
pub async fn forget(app: &Arc<App>, id: &SandboxId) -> Result<(), Error> {
    let paused = stored(app, id)
        .await?
        .filter(|record| record.of_sandbox.is_some() && record.sandbox.as_ref() == Some(id));
    if paused.is_some() {
        return workspaces::delete(app, &name(id)?).await;
    }
    let sandbox = app.sandboxes.get(id)?;
    sandbox.stop.cancel();
    sandbox.gone.cancelled().await;
    Ok(())
}
