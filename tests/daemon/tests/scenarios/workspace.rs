//! Workspaces: suspend and resume.

use forkd_api::{CreateWorkspace, ErrorCode, WorkspaceStatus};
use forkd_daemon_tests::fake::{Fault, Step};
use forkd_daemon_tests::{Daemon, Leftovers, Options, Sandbox, until};

use crate::{TAG, daemon, daemon_with};

const NAME: &str = "mine";

async fn workspace(daemon: &Daemon) -> Sandbox {
    let request = CreateWorkspace {
        name: NAME.to_owned(),
        snapshot_tag: TAG.to_owned(),
        per_child_netns: false,
        memory_limit_mib: None,
        network: None,
    };
    let made = daemon.client().create_workspace(&request).await.unwrap();
    Sandbox::new(daemon.client(), &made.live_sandbox_id.unwrap())
}

async fn status(daemon: &Daemon) -> WorkspaceStatus {
    daemon.client().workspaces().await.unwrap()[0].status
}

#[tokio::test]
async fn a_workspace_sleeps_without_a_process_and_wakes_where_it_was() {
    let mut daemon = daemon().await;
    let sandbox = workspace(&daemon).await;
    for round in 0..3 {
        sandbox.write("/round", &round.to_string()).await.unwrap();
        let diff = round % 2 == 1;
        daemon.client().suspend_workspace(NAME, diff).await.unwrap();
        assert_eq!(status(&daemon).await, WorkspaceStatus::Suspended);
        until("nothing of the sandbox is left", async || {
            (daemon.leftovers() == Leftovers::default()).then_some(())
        })
        .await;
        daemon.restart().await;
        let woken = daemon.client().resume_workspace(NAME).await.unwrap();
        assert_eq!(woken.live_sandbox_id.as_ref(), Some(&sandbox.id));
        let sandbox = Sandbox::new(daemon.client(), &sandbox.id);
        assert_eq!(sandbox.read("/round").await.unwrap(), round.to_string());
    }
    daemon.client().delete_workspace(NAME).await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_suspend_that_fails_leaves_the_workspace_running() {
    let daemon = daemon().await;
    let sandbox = workspace(&daemon).await;
    sandbox.write("/kept", "kept").await.unwrap();
    for step in Step::OF_A_CUT {
        daemon.faults().inject(step, Fault::Fail);
        let error = daemon.client().suspend_workspace(NAME, true).await;
        assert!(error.is_err(), "{step:?}");
        assert_eq!(status(&daemon).await, WorkspaceStatus::Running, "{step:?}");
        assert_eq!(sandbox.read("/kept").await.unwrap(), "kept", "{step:?}");
    }
    daemon.client().suspend_workspace(NAME, true).await.unwrap();
    daemon.faults().inject(Step::Restore, Fault::Fail);
    daemon.client().resume_workspace(NAME).await.unwrap_err();
    daemon.client().resume_workspace(NAME).await.unwrap();
    assert_eq!(sandbox.read("/kept").await.unwrap(), "kept");
    daemon.client().delete_workspace(NAME).await.unwrap();
    daemon.ends_clean().await;
}

/// Adds a row that no daemon of this version writes, while none runs.
fn add_row(daemon: &Daemon, name: &str, record: &[u8]) {
    let db = rusqlite::Connection::open(daemon.data().join("state.db")).unwrap();
    let insert = "INSERT INTO workspaces (name, record) VALUES (?1, CAST(?2 AS TEXT))";
    db.execute(insert, rusqlite::params![name, record]).unwrap();
}

#[tokio::test]
async fn a_bad_row_is_one_bad_workspace() {
    let options = Options {
        tokens: vec!["operator".into()],
        ..Options::default()
    };
    let mut daemon = daemon_with(options).await;
    let sandbox = workspace(&daemon).await;
    daemon.client().suspend_workspace(NAME, true).await.unwrap();
    daemon.stop().await;
    add_row(&daemon, "half", b"{half");
    add_row(&daemon, "bytes", b"\xff");
    add_row(&daemon, "newer", br#"{"version": 99}"#);
    // Names that no request can have.
    add_row(&daemon, "/../", b"{half");
    daemon.launch().await;
    let client = daemon.client();
    let names = async || {
        let all = client.workspaces().await.unwrap();
        all.into_iter().map(|info| info.name).collect::<Vec<_>>()
    };
    assert_eq!(names().await, [NAME]);
    let user = daemon.user("user").await;
    for (bad, problem) in [
        ("half", "does not parse"),
        ("bytes", "does not parse"),
        ("newer", "has version 99"),
    ] {
        let error = client.resume_workspace(bad).await.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::Internal));
        assert!(error.to_string().contains(problem), "{error}");
        let hidden = user.delete_workspace(bad).await.unwrap_err();
        assert_eq!(hidden.code(), Some(ErrorCode::WorkspaceNotFound));
        client.delete_workspace(bad).await.unwrap();
        let gone = client.delete_workspace(bad).await.unwrap_err();
        assert_eq!(gone.code(), Some(ErrorCode::WorkspaceNotFound));
    }
    client.resume_workspace(NAME).await.unwrap();
    let sandbox = Sandbox::new(client, &sandbox.id);
    assert_eq!(sandbox.read("/mark").await.unwrap().trim(), "parent");
    client.delete_workspace(NAME).await.unwrap();
    daemon.ends_clean().await;
}
