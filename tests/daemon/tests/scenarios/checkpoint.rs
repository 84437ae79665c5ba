//! Checkpoints and roll-backs.

use forkd_api::{BranchMode, CheckpointRequest, ErrorCode, RollbackRequest};
use forkd_daemon_tests::fake::{Fault, Step};
use forkd_daemon_tests::{Daemon, Options, Sandbox, until};
use forkd_rest_client::Error;

use crate::{TAG, daemon, daemon_with};

pub async fn keep(daemon: &Daemon, sandbox: &Sandbox, name: &str) -> Result<(), Error> {
    let request = CheckpointRequest {
        name: Some(name.to_owned()),
    };
    daemon
        .client()
        .checkpoint(&sandbox.id, &request)
        .await
        .map(drop)
}

pub async fn go_back(daemon: &Daemon, sandbox: &Sandbox, name: &str) -> Result<(), Error> {
    let request = RollbackRequest {
        to: Some(name.to_owned()),
    };
    daemon
        .client()
        .rollback(&sandbox.id, &request)
        .await
        .map(drop)
}

#[tokio::test]
async fn a_sandbox_goes_back_in_place() {
    let daemon = daemon().await;
    let sandbox = daemon.child(TAG).await;
    for name in ["a", "b", "c"] {
        sandbox.write("/state", name).await.unwrap();
        keep(&daemon, &sandbox, name).await.unwrap();
    }
    sandbox.write("/state", "d").await.unwrap();
    go_back(&daemon, &sandbox, "b").await.unwrap();
    assert_eq!(sandbox.read("/state").await.unwrap(), "b");
    go_back(&daemon, &sandbox, "a").await.unwrap();
    assert_eq!(sandbox.read("/state").await.unwrap(), "a");
    sandbox.branch("back", BranchMode::Diff).await.unwrap();
    let child = daemon.child("back").await;
    assert_eq!(child.read("/state").await.unwrap(), "a");
    daemon.ends_clean().await;
}

/// The names by which others know a guest.
async fn names(sandbox: &Sandbox) -> (String, String) {
    let machine = sandbox.run(&["cat", "/etc/machine-id"]).await.unwrap();
    let host = sandbox.run(&["hostname"]).await.unwrap();
    (machine.stdout, host.stdout)
}

#[tokio::test]
async fn a_sandbox_keeps_its_names_when_it_goes_back() {
    let daemon = daemon().await;
    let (sandbox, sibling) = (daemon.child(TAG).await, daemon.child(TAG).await);
    let before = names(&sandbox).await;
    assert_ne!(
        before,
        names(&sibling).await,
        "children have names of their own"
    );
    assert_eq!(before.0.trim().len(), 32, "{before:?}");
    keep(&daemon, &sandbox, "a").await.unwrap();
    sandbox.write("/state", "b").await.unwrap();
    go_back(&daemon, &sandbox, "a").await.unwrap();
    assert_eq!(names(&sandbox).await, before);
    daemon.ends_clean().await;
}

#[tokio::test]
async fn nothing_changed_is_no_new_checkpoint() {
    let daemon = daemon().await;
    let sandbox = daemon.child(TAG).await;
    sandbox.write("/state", "a").await.unwrap();
    keep(&daemon, &sandbox, "a").await.unwrap();
    let request = CheckpointRequest {
        name: Some("same".to_owned()),
    };
    let same = daemon
        .client()
        .checkpoint(&sandbox.id, &request)
        .await
        .unwrap();
    assert!(same.unchanged);
    sandbox.write("/state", "b").await.unwrap();
    go_back(&daemon, &sandbox, "same").await.unwrap();
    assert_eq!(sandbox.read("/state").await.unwrap(), "a");
    daemon
        .client()
        .drop_checkpoint(&sandbox.id, "same")
        .await
        .unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_refused_checkpoint_or_roll_back_changes_nothing() {
    let daemon = daemon().await;
    let sandbox = daemon.child(TAG).await;
    sandbox.write("/state", "a").await.unwrap();
    keep(&daemon, &sandbox, "a").await.unwrap();
    sandbox.write("/state", "b").await.unwrap();
    for step in [Step::Checkpoint, Step::CheckpointTaken] {
        daemon.faults().inject(step, Fault::Fail);
        keep(&daemon, &sandbox, "half").await.unwrap_err();
        let names = daemon.client().checkpoints(&sandbox.id).await.unwrap();
        assert_eq!(names.len(), 1, "{step:?}");
        assert_eq!(sandbox.read("/state").await.unwrap(), "b", "{step:?}");
    }
    daemon.faults().inject(Step::Rollback, Fault::Fail);
    go_back(&daemon, &sandbox, "a").await.unwrap_err();
    assert_eq!(sandbox.read("/state").await.unwrap(), "b");
    go_back(&daemon, &sandbox, "a").await.unwrap();
    assert_eq!(sandbox.read("/state").await.unwrap(), "a");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_vmm_that_dies_at_a_checkpoint_or_roll_back_is_noticed() {
    let daemon = daemon().await;
    for step in [
        Step::Checkpoint,
        Step::CheckpointTaken,
        Step::Rollback,
        Step::RolledBack,
    ] {
        let sandbox = daemon.child(TAG).await;
        keep(&daemon, &sandbox, "a").await.unwrap();
        sandbox.write("/state", "b").await.unwrap();
        daemon.faults().inject(step, Fault::Die);
        if matches!(step, Step::Checkpoint | Step::CheckpointTaken) {
            keep(&daemon, &sandbox, "b").await.unwrap_err();
        } else {
            go_back(&daemon, &sandbox, "a").await.unwrap_err();
        }
        until(&format!("the end at {step:?} is noticed"), async || {
            (!sandbox.runs().await).then_some(())
        })
        .await;
        daemon.client().kill(&sandbox.id).await.unwrap();
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_vmm_that_hangs_at_a_checkpoint_or_roll_back_is_killed() {
    let daemon = daemon_with(Options::args(&["--vmm-timeout", "5s"])).await;
    for step in [Step::CheckpointTaken, Step::RolledBack] {
        let sandbox = daemon.child(TAG).await;
        keep(&daemon, &sandbox, "a").await.unwrap();
        sandbox.write("/state", "b").await.unwrap();
        daemon.faults().inject(step, Fault::Hold);
        let hung = match step {
            Step::CheckpointTaken => keep(&daemon, &sandbox, "b").await,
            _ => go_back(&daemon, &sandbox, "a").await,
        };
        let error = hung.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::Timeout), "{step:?}: {error}");
        until(&format!("the end at {step:?} is noticed"), async || {
            (!sandbox.runs().await).then_some(())
        })
        .await;
        daemon.client().kill(&sandbox.id).await.unwrap();
    }
    daemon.ends_clean().await;
}
