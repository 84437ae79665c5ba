//! Cuts with frozen user processes, and children whose random numbers are not their own.

use forkd_api::{BranchMode, CreateSandboxes, ErrorCode, SandboxState};
use forkd_daemon_tests::fake::{Fault, Step};
use forkd_daemon_tests::{Daemon, Sandbox, until};

use crate::checkpoint::{go_back, keep};
use crate::{TAG, daemon};

/// User processes of the guest run: it starts another.
async fn runs(sandbox: &Sandbox, what: &str) {
    until(&format!("{what}: user processes run"), async || {
        sandbox.run(&["true"]).await.ok()
    })
    .await;
}

/// State of the user processes of a child until its identity was in force. Only a fake guest keeps it.
async fn at_identity(child: &Sandbox) -> String {
    child.read("/run/processes-at-identity").await.unwrap()
}

#[tokio::test]
async fn processes_stand_still_until_a_child_has_its_identity() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    assert_eq!(at_identity(&source).await, "frozen", "a parent is frozen");
    for mode in [BranchMode::Full, BranchMode::Diff, BranchMode::Live] {
        let tag = format!("{mode:?}").to_lowercase();
        source.branch_frozen(&tag, mode).await.unwrap();
        runs(&source, &tag).await;
        let child = daemon.child(&tag).await;
        assert_eq!(at_identity(&child).await, "frozen", "{tag}");
        runs(&child, &tag).await;
    }
    let children = source.fork_frozen(2).await.unwrap();
    runs(&source, "a fork").await;
    assert_eq!(children.len(), 2);
    for child in &children {
        assert_eq!(at_identity(child).await, "frozen");
        runs(child, "a child of a fork").await;
    }
    // Only on request.
    let child = &source.fork(1).await.unwrap()[0];
    assert_eq!(at_identity(child).await, "running");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn processes_run_again_after_a_cut_that_failed() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    for step in Step::OF_A_CUT {
        let what = format!("{step:?} fails");
        daemon.faults().inject(step, Fault::Fail);
        let error = source.branch_frozen("half", BranchMode::Diff).await;
        error.expect_err(&what);
        runs(&source, &what).await;
        daemon.faults().inject(step, Fault::Fail);
        source.fork_frozen(1).await.expect_err(&what);
        runs(&source, &what).await;
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_guest_that_cannot_be_frozen_is_not_cut() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    daemon.faults().inject(Step::Freeze, Fault::Fail);
    // The VMM is not asked.
    daemon.faults().inject(Step::Cut, Fault::Die);
    let error = source.branch_frozen("half", BranchMode::Diff).await;
    assert_eq!(error.unwrap_err().code(), Some(ErrorCode::Timeout));
    daemon.faults().clear();
    assert_eq!(daemon.tags().await, [TAG]);
    runs(&source, "a refused freeze").await;
    source
        .branch_frozen("whole", BranchMode::Diff)
        .await
        .unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn processes_run_again_when_the_daemon_died_in_a_cut() {
    let mut daemon = daemon().await;
    let id = daemon.child(TAG).await.id;
    for step in Step::OF_A_CUT {
        let source = Sandbox::new(daemon.client(), &id);
        let held = daemon.faults().inject(step, Fault::Hold);
        tokio::spawn(async move { source.branch_frozen("half", BranchMode::Diff).await });
        daemon.faults().reached(&held).await;
        daemon.kill().await;
        daemon.faults().release(&held);
        daemon.launch().await;
        let source = Sandbox::new(daemon.client(), &id);
        runs(&source, &format!("killed at {step:?}")).await;
    }
    daemon.ends_clean().await;
}

/// The state and the error of the only child of a request.
async fn only_child(daemon: &Daemon) -> Result<(), ErrorCode> {
    let request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        n: 1,
        ..CreateSandboxes::default()
    };
    match daemon.client().spawn(&request).await {
        Err(error) => Err(error.code().expect("a code")),
        Ok(made) if made[0].state == SandboxState::Running => Ok(()),
        Ok(made) => Err(made[0].error.as_ref().expect("a reason").code),
    }
}

#[tokio::test]
async fn a_child_that_shares_random_numbers_is_not_ready() {
    let daemon = daemon().await;
    daemon.faults().inject(Step::Reseed, Fault::Fail);
    assert_eq!(only_child(&daemon).await, Err(ErrorCode::AgentFailed));
    assert_eq!(only_child(&daemon).await, Ok(()));
    let source = daemon.child(TAG).await;
    daemon.faults().inject(Step::Reseed, Fault::Fail);
    let children = source.fork(1).await.unwrap_or_default();
    assert!(children.is_empty(), "{children:?}");
    keep(&daemon, &source, "a").await.unwrap();
    daemon.faults().inject(Step::Reseed, Fault::Fail);
    let error = go_back(&daemon, &source, "a").await.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::AgentFailed), "{error}");
    daemon.ends_clean().await;
}
