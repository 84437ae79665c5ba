//! Workspaces: sandboxes with a name that can be suspended and resumed.
//!
//! A suspend writes the state under a new tag and ends the sandbox; a resume starts the sandbox again under its old ID.
//! Requests for one workspace run one at a time ([`Locks`]). An old state is removed only when the new one is durable.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use forkd_api::{ErrorCode, EventKind, WorkspaceInfo, WorkspaceStatus};
use forkd_store::{Deletion, Entry, Origin};
use forkd_types::{Policy, SandboxId, Tag};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;

use crate::app::App;
use crate::clock;
use crate::error::Error;
use crate::host_limits::HostLimits;
use crate::ops::branch;
use crate::ops::snapshots;
use crate::ops::spawn::{CreateRequest, create};
use crate::sandbox::{CutMode, Destination};
use crate::state::{
    DbError, NetworkRecord, OnExpiry, PortsRecord, RECORD_VERSION, WorkspaceRecord,
};

/// One request at a time for each workspace. A name takes memory only while a request uses it.
#[derive(Debug, Default)]
pub struct Locks(Mutex<HashMap<Tag, Arc<tokio::sync::Mutex<()>>>>);

impl Locks {
    pub(super) async fn hold<'a>(&'a self, name: &Tag) -> HeldLock<'a> {
        let lock = Arc::clone(self.map().entry(name.clone()).or_default());
        HeldLock {
            locks: self,
            name: name.clone(),
            guard: Some(lock.lock_owned().await),
        }
    }

    fn map(&self) -> MutexGuard<'_, HashMap<Tag, Arc<tokio::sync::Mutex<()>>>> {
        self.0.lock()
    }
}

pub(super) struct HeldLock<'a> {
    locks: &'a Locks,
    name: Tag,
    guard: Option<tokio::sync::OwnedMutexGuard<()>>,
}

impl Drop for HeldLock<'_> {
    fn drop(&mut self) {
        self.guard = None;
        let mut map = self.locks.map();
        // The map has one reference, and every request that waits has another.
        if map
            .get(&self.name)
            .is_some_and(|lock| Arc::strong_count(lock) == 1)
        {
            map.remove(&self.name);
        }
    }
}

/// A checked wish for a workspace.
#[derive(Debug, Clone)]
pub struct NewWorkspace {
    pub name: Tag,
    /// The snapshot to start from.
    pub tag: Tag,
    pub owner: String,
    /// Give it a network namespace of its own.
    pub per_child_netns: bool,
    /// Limit on host memory.
    pub memory_limit_mib: Option<u64>,
    /// The network policy; that of the daemon if missing.
    pub network: Option<Policy>,
}

/// As the API shows it.
fn info(app: &App, record: &WorkspaceRecord) -> WorkspaceInfo {
    let live = record
        .sandbox
        .as_ref()
        .filter(|_| !record.suspended)
        .filter(|id| {
            app.sandboxes
                .get(id)
                .is_ok_and(|found| found.phase() != crate::sandbox::Phase::Failed)
        });
    WorkspaceInfo {
        id: record.id.clone(),
        name: record.name.to_string(),
        source_snapshot_tag: record.source.to_string(),
        current_state_tag: record.state_tag.as_ref().map(ToString::to_string),
        status: match (&live, record.suspended) {
            (Some(_), _) => WorkspaceStatus::Running,
            (None, true) => WorkspaceStatus::Suspended,
            (None, false) => WorkspaceStatus::Stale,
        },
        live_sandbox_id: live.map(ToString::to_string),
        created_at_unix: record.created_at_unix,
        last_active_unix: record.last_active_unix,
        last_branch_memory_path: record.last_branch_memory_path.clone(),
        owner: record.owner.clone(),
    }
}

async fn find(app: &Arc<App>, name: &Tag) -> Result<WorkspaceRecord, Error> {
    let found = app.db.workspace(name.clone()).await?;
    found.ok_or_else(|| not_found(name))
}

/// The refusal for a name that no workspace has.
pub fn not_found(name: &Tag) -> Error {
    Error::hinted(
        ErrorCode::WorkspaceNotFound,
        format!("there is no workspace {name}"),
        "GET /v1/workspaces (forkd workspace list) lists what there is",
    )
}

fn is_unreadable(error: &Error) -> bool {
    matches!(error, Error::Db(DbError::Unreadable { .. }))
}

/// Who owns a workspace. One that cannot be read belongs to the administrators.
pub async fn owner(app: &Arc<App>, name: &Tag) -> Result<String, Error> {
    match find(app, name).await {
        Ok(record) => Ok(record.owner),
        Err(error) if is_unreadable(&error) => Ok(String::new()),
        Err(error) => Err(error),
    }
}

/// Every workspace that can be read.
pub async fn list(app: &Arc<App>) -> Result<Vec<WorkspaceInfo>, Error> {
    let records = app.db.workspaces().await?.readable;
    Ok(records.iter().map(|record| info(app, record)).collect())
}

pub async fn get(app: &Arc<App>, name: &Tag) -> Result<WorkspaceInfo, Error> {
    Ok(info(app, &find(app, name).await?))
}

/// Makes a workspace and starts it.
pub async fn make(app: &Arc<App>, wish: NewWorkspace) -> Result<WorkspaceInfo, Error> {
    let _one = app.workspace_locks.hold(&wish.name).await;
    if app.db.workspace(wish.name.clone()).await?.is_some() {
        return Err(Error::refused(
            ErrorCode::AlreadyExists,
            format!("there is already a workspace {}", wish.name),
        ));
    }
    let now = clock::unix();
    let mut record = WorkspaceRecord {
        version: RECORD_VERSION,
        name: wish.name,
        id: String::new(),
        owner: wish.owner,
        source: wish.tag.clone(),
        state_tag: None,
        sandbox: None,
        suspended: false,
        created_at_unix: now,
        last_active_unix: now,
        per_child_netns: wish.per_child_netns,
        memory_limit_mib: wish.memory_limit_mib,
        last_branch_memory_path: None,
        network: wish.network.as_ref().map(NetworkRecord::first),
        of_sandbox: None,
    };
    start(app, &mut record, wish.tag).await?;
    let id = record
        .sandbox
        .as_ref()
        .map(ToString::to_string)
        .unwrap_or_default();
    record.id = format!("ws-{}", id.chars().take(16).collect::<String>());
    save(app, &record).await
}

async fn save(app: &Arc<App>, record: &WorkspaceRecord) -> Result<WorkspaceInfo, Error> {
    app.db.put_workspace(record.clone()).await?;
    let info = info(app, record);
    let status = format!("{:?}", info.status).to_lowercase();
    app.events.tell_of(
        Some(record.owner.clone()),
        EventKind::WorkspaceChanged,
        &record.name,
        Some(status),
    );
    Ok(info)
}

/// The request for the sandbox of a workspace, with the settings that it had as a sandbox of its own.
pub(super) fn request(app: &App, record: &WorkspaceRecord, tag: Tag) -> CreateRequest {
    let bare = CreateRequest {
        tag,
        count: 1,
        owner: record.owner.clone(),
        expires_at_unix: None,
        on_expiry: OnExpiry::Delete,
        memory_limit_mib: record.memory_limit_mib,
        limits: HostLimits::default(),
        network: match &record.network {
            Some(network) => network.policy(),
            None => app.default_network(),
        },
        labels: BTreeMap::new(),
        env: BTreeMap::new(),
        metadata: BTreeMap::new(),
        workspace: Some(record.name.to_string()),
        id: record.sandbox.clone(),
        ports: PortsRecord::default(),
        per_child_netns: record.per_child_netns,
        volumes: Vec::new(),
    };
    match record.of_sandbox.as_deref().cloned() {
        None => bare,
        Some(kept) => CreateRequest {
            on_expiry: kept.on_expiry,
            limits: kept.limits,
            labels: kept.labels,
            env: kept.env,
            metadata: kept.metadata,
            workspace: None,
            ports: kept.ports,
            ..bare
        },
    }
}

/// Starts the sandbox of a workspace, under the id it had before.
async fn start(app: &Arc<App>, record: &mut WorkspaceRecord, tag: Tag) -> Result<(), Error> {
    let made = create(app, request(app, record, tag)).await?;
    record.sandbox = made.first().and_then(|info| info.id.parse().ok());
    record.suspended = false;
    record.last_active_unix = clock::unix();
    Ok(())
}

/// Writes the state down and ends the sandbox.
pub async fn suspend(app: &Arc<App>, name: &Tag, diff: bool) -> Result<WorkspaceInfo, Error> {
    let _one = app.workspace_locks.hold(name).await;
    let record = find(app, name).await?;
    suspend_held(app, record, diff).await
}

/// The same for a caller that holds the lock of the workspace.
pub(super) async fn suspend_held(
    app: &Arc<App>,
    mut record: WorkspaceRecord,
    diff: bool,
) -> Result<WorkspaceInfo, Error> {
    let name = &record.name.clone();
    let status = info(app, &record).status;
    let (Some(id), WorkspaceStatus::Running) = (record.sandbox.clone(), status) else {
        return Err(wrong_state(name, "is not running", status));
    };
    let sandbox = app.sandboxes.get(&id)?;
    let slot = app.cut_slot().await?;
    remove_strays(app, &record).await;
    let tag = new_state_tag(name)?;
    let mode = if diff { CutMode::Diff } else { CutMode::Full };
    // Nothing is answered by the guest after this, unless it fails and the guest goes on.
    let (held, until) = oneshot::channel();
    let claim = branch::claim(app, &tag, &sandbox.owner(), Some(id.to_string())).await?;
    let made = branch::cut(&sandbox, Destination::Suspend { claim, until }, mode, false).await?;
    drop(slot);
    let old = record.state_tag.replace(tag);
    record.suspended = true;
    record.last_active_unix = clock::unix();
    let last = sandbox.record();
    record.last_branch_memory_path = last.last_branch_memory_path;
    // A policy that was changed since the start is kept.
    record.network = Some(last.network);
    let info = save(app, &record).await?;
    drop(made);
    sandbox.stop.cancel();
    sandbox.gone.cancelled().await;
    drop(held);
    if let Some(old) = old {
        tidy(app, old).await;
    }
    Ok(info)
}

/// How many characters of a workspace's name are in its state tags.
const SHOWN: usize = 40;

/// The prefix of the state tags of a workspace. Names with the same beginning differ in the digest.
fn state_prefix(name: &Tag) -> String {
    let shown: String = name.as_str().chars().take(SHOWN).collect();
    let digest = blake3::hash(name.as_str().as_bytes()).to_hex();
    let digest: String = digest.chars().take(8).collect();
    format!("ws-{shown}-{digest}-")
}

/// The state is written beside the one before it, which goes only when the new one is durable.
fn new_state_tag(name: &Tag) -> Result<Tag, Error> {
    format!("{}{:08x}", state_prefix(name), rand::random::<u32>())
        .parse()
        .map_err(|_| Error::Task)
}

fn is_state_tag(name: &Tag, tag: &Tag) -> bool {
    tag.as_str()
        .strip_prefix(&state_prefix(name))
        .is_some_and(|rest| rest.len() == 8 && rest.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Removes states that an unfinished suspend wrote. A snapshot that was not cut from the workspace's sandbox belongs to
/// the user, whatever its name.
async fn remove_strays(app: &Arc<App>, record: &WorkspaceRecord) {
    for entry in app.store.list() {
        let Entry::Whole(manifest) = entry else {
            continue;
        };
        let cut_from = match &manifest.origin {
            Origin::Branch { sandbox, .. } => Some(sandbox.as_str()),
            _ => None,
        };
        if is_state_tag(&record.name, &manifest.tag)
            && record.state_tag.as_ref() != Some(&manifest.tag)
            && cut_from == record.sandbox.as_ref().map(SandboxId::as_str)
        {
            tidy(app, manifest.tag.clone()).await;
        }
    }
}

/// Removes a state that is no longer needed. Content that another state shares with it stays in the store.
async fn remove_state(app: &Arc<App>, tag: Tag) -> Result<(), Error> {
    match snapshots::delete(app, tag, Deletion::Force).await {
        Err(error) if error.code() == ErrorCode::SnapshotNotFound => Ok(()),
        other => other,
    }
}

/// The same where it is no part of what was asked: the next suspend tries again.
pub(super) async fn tidy(app: &Arc<App>, tag: Tag) {
    if let Err(error) = remove_state(app, tag.clone()).await {
        tracing::warn!(%tag, error = error.chain(), "an old state was not deleted");
    }
}

/// Ends sandboxes whose suspend an earlier daemon wrote down and did not bring to its end.
pub async fn end_suspended(app: &Arc<App>) -> Result<(), Error> {
    let stored = app.db.workspaces().await?;
    for bad in stored.unreadable {
        tracing::error!(workspace = %bad.id, problem = bad.problem, "a stored record cannot be read");
    }
    let left: Vec<_> = stored
        .readable
        .iter()
        .filter(|record| record.suspended)
        .filter_map(|record| app.sandboxes.get(record.sandbox.as_ref()?).ok())
        .collect();
    for sandbox in &left {
        tracing::info!(sandbox = %sandbox.id, "its workspace is suspended: ended");
        sandbox.stop.cancel();
    }
    for sandbox in &left {
        sandbox.gone.cancelled().await;
    }
    Ok(())
}

/// Starts the sandbox again from its state.
pub async fn resume(app: &Arc<App>, name: &Tag) -> Result<WorkspaceInfo, Error> {
    let _one = app.workspace_locks.hold(name).await;
    let mut record = find(app, name).await?;
    let status = info(app, &record).status;
    if status == WorkspaceStatus::Running {
        return Err(wrong_state(name, "is running already", status));
    }
    if let Some(dead) = record
        .sandbox
        .as_ref()
        .and_then(|id| app.sandboxes.get(id).ok())
    {
        dead.stop.cancel();
        dead.gone.cancelled().await;
    }
    let tag = record
        .state_tag
        .clone()
        .unwrap_or_else(|| record.source.clone());
    start(app, &mut record, tag).await?;
    save(app, &record).await
}

/// Ends the sandbox and forgets the state.
pub async fn delete(app: &Arc<App>, name: &Tag) -> Result<(), Error> {
    let _one = app.workspace_locks.hold(name).await;
    let record = match find(app, name).await {
        // Its sandbox and its state are unknown.
        Err(error) if is_unreadable(&error) => {
            return Ok(app.db.delete_workspace(name.clone()).await?);
        }
        found => found?,
    };
    remove_strays(app, &record).await;
    app.db.delete_workspace(name.clone()).await?;
    if let Some(live) = record
        .sandbox
        .as_ref()
        .and_then(|id| app.sandboxes.get(id).ok())
    {
        live.stop.cancel();
        live.gone.cancelled().await;
    }
    if let Some(tag) = record.state_tag {
        remove_state(app, tag).await?;
    }
    app.events.tell_of(
        Some(record.owner),
        EventKind::WorkspaceChanged,
        name,
        Some("deleted".into()),
    );
    Ok(())
}

fn wrong_state(name: &Tag, what: &str, status: WorkspaceStatus) -> Error {
    let hint = match status {
        WorkspaceStatus::Running => "suspend it first",
        WorkspaceStatus::Suspended | WorkspaceStatus::Stale => "resume it first",
    };
    Error::hinted(
        ErrorCode::InvalidRequest,
        format!("workspace {name} {what}"),
        hint,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_that_nobody_uses_takes_no_memory() {
        let locks = Locks::default();
        let name: Tag = "w".parse().unwrap();
        let held = locks.hold(&name).await;
        let waiting = locks.hold(&name);
        tokio::pin!(waiting);
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(held);
        drop(waiting.await);
        assert!(locks.map().is_empty());
    }

    #[test]
    fn state_tags_are_new_each_time_and_belong_to_one_workspace() {
        let alike = format!("{:a<50}", "");
        let names = [
            "mine",
            &alike,
            &format!("{alike}b"),
            &format!("{:a<64}", ""),
        ];
        let names: Vec<Tag> = names.iter().map(|name| name.parse().unwrap()).collect();
        for name in &names {
            let tag = new_state_tag(name).unwrap();
            assert_ne!(tag, new_state_tag(name).unwrap());
            let owners = names.iter().filter(|name| is_state_tag(name, &tag));
            assert_eq!(owners.collect::<Vec<_>>(), [name]);
        }
        for other in ["ws-mine-state", "ws-mine", "mine"] {
            assert!(!is_state_tag(&names[0], &other.parse().unwrap()));
        }
    }
}
