//! Leftovers of a killed daemon, and what the next daemon does with them.

mod local;
mod published;

use std::sync::Arc;

use forkd_sandboxes::app::App;
use forkd_sandboxes::ops::{pause, workspaces};
use forkd_sandboxes::sandbox::birth::Birth;
use forkd_sandboxes::sandbox::{SandboxHandle, owner};
use forkd_sandboxes::state::{
    OnExpiry, RECORD_VERSION, SandboxRecord, SuspendedSandbox, WorkspaceRecord,
};
use forkd_store::Manifest;
use forkd_types::{SandboxId, Tag};
use local::app;
use published::publish;

const ID: &str = "sb-00000001-0000000000000001";

fn tags(app: &App) -> Vec<String> {
    let list = app.store.list();
    list.iter().map(|entry| entry.tag().to_string()).collect()
}

fn workspace(name: &str, suspended: bool, state_tag: Option<Tag>) -> WorkspaceRecord {
    WorkspaceRecord {
        version: RECORD_VERSION,
        name: name.parse().unwrap(),
        id: "ws-1".into(),
        owner: "me".into(),
        source: "base".parse().unwrap(),
        state_tag,
        sandbox: Some(ID.parse().unwrap()),
        suspended,
        created_at_unix: 1,
        last_active_unix: 1,
        per_child_netns: false,
        memory_limit_mib: None,
        last_branch_memory_path: None,
        network: None,
        of_sandbox: None,
    }
}

/// A sandbox without a VM: its owner waits for its end.
fn enter(app: &Arc<App>, manifest: &Manifest) -> Arc<SandboxHandle> {
    let record: SandboxRecord = serde_json::from_value(serde_json::json!({
        "id": ID,
        "state": "running",
        "tag": manifest.tag,
        "manifest": manifest.digest(),
        "pid": 1,
        "owner": "me",
        "created_at_unix": 1,
        "memory_mib": 1,
        "vcpus": 1,
        "cpu": manifest.cpu,
        "memory": manifest.memory,
        "disks": [],
        "source": manifest.source,
    }))
    .unwrap();
    let slot = app.limits.adopted("me");
    owner::start(app, record, slot, Birth::Lost("there is no VM".into()))
}

#[tokio::test]
async fn the_sandbox_of_a_suspended_workspace_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let sandbox = enter(&app, &publish(&app, "base", ID));
    let id: SandboxId = ID.parse().unwrap();
    app.db
        .put_workspace(workspace("w", false, None))
        .await
        .unwrap();
    workspaces::end_suspended(&app).await.unwrap();
    assert!(!sandbox.stop.is_cancelled());
    app.db
        .put_workspace(workspace("w", true, None))
        .await
        .unwrap();
    workspaces::end_suspended(&app).await.unwrap();
    assert!(app.sandboxes.get(&id).is_err());
}

#[tokio::test]
async fn states_that_a_suspend_left_go_with_their_workspace() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let digest = blake3::hash(b"w").to_hex();
    let state = |end: &str| format!("ws-w-{}-{end}", &digest[..8]);
    let current = state("00000001");
    publish(&app, &current, ID);
    publish(&app, &state("00000002"), ID);
    // Belongs to another workspace, in spite of its name.
    publish(&app, &state("00000003"), "sb-2");
    publish(&app, "mine", ID);
    let record = workspace("w", true, Some(current.parse().unwrap()));
    let name = record.name.clone();
    app.db.put_workspace(record).await.unwrap();
    workspaces::delete(&app, &name).await.unwrap();
    assert_eq!(tags(&app), ["mine".to_owned(), state("00000003")]);
}

#[tokio::test]
async fn a_workspace_that_cannot_be_read_does_not_hide_paused_sandboxes() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let paused = WorkspaceRecord {
        of_sandbox: Some(Box::new(SuspendedSandbox {
            on_expiry: OnExpiry::Delete,
            limits: Default::default(),
            labels: Default::default(),
            env: Default::default(),
            metadata: Default::default(),
            memory_mib: 1,
            vcpus: 1,
            disk_bytes: 0,
            ports: Default::default(),
        })),
        ..workspace(ID, true, None)
    };
    let (bad, good): (SandboxId, SandboxId) = ("sb-2".parse().unwrap(), ID.parse().unwrap());
    app.db.put_workspace(paused.clone()).await.unwrap();
    app.db
        .run(|c| {
            c.execute("INSERT INTO workspaces VALUES ('sb-2', '{half')", [])?;
            Ok(())
        })
        .await
        .unwrap();
    assert_eq!(
        pause::list(&app).await.unwrap(),
        std::slice::from_ref(&paused)
    );
    assert_eq!(pause::find(&app, &good).await.unwrap(), Some(paused));
    assert_eq!(pause::find(&app, &bad).await.unwrap(), None);
    assert!(pause::forget(&app, &bad).await.is_err());
}
