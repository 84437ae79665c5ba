//! Deletion at any time.

use forkd_api::{BranchMode, ErrorCode};
use forkd_daemon_tests::fake::{Fault, Step};
use forkd_daemon_tests::{Options, until};

use crate::checkpoint::{go_back, keep};
use crate::{TAG, daemon, daemon_with};

#[tokio::test]
async fn a_sandbox_is_deleted_while_it_starts() {
    let daemon = daemon().await;
    for step in [Step::Restore, Step::Connect, Step::Identity] {
        let held = daemon.faults().inject(step, Fault::Hold);
        let spawning = daemon.spawn(TAG, 1);
        let deleting = async {
            daemon.faults().reached(&held).await;
            let id = until("the sandbox is listed", async || {
                daemon.sandboxes().await.pop().map(|info| info.id)
            })
            .await;
            let deleted = daemon.client().kill(&id);
            let released = async {
                // The daemon may wait for the step; it must not wait for ever.
                tokio::task::yield_now().await;
                daemon.faults().release(&held);
            };
            let (deleted, ()) = tokio::join!(deleted, released);
            deleted.unwrap();
        };
        let (spawned, ()) = tokio::join!(spawning, deleting);
        // Whether the create or the delete came first is open; the sandbox is gone in the end.
        drop(spawned);
        until(&format!("nothing is listed after {step:?}"), async || {
            daemon.sandboxes().await.is_empty().then_some(())
        })
        .await;
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_sandbox_is_deleted_while_it_is_cut() {
    let daemon = daemon().await;
    for step in Step::OF_A_CUT {
        let source = daemon.child(TAG).await;
        let held = daemon.faults().inject(step, Fault::Hold);
        let branching = source.branch("half", BranchMode::Diff);
        let deleting = async {
            daemon.faults().reached(&held).await;
            daemon.client().kill(&source.id).await.unwrap();
        };
        let (branched, ()) = tokio::join!(branching, deleting);
        assert!(branched.is_err(), "{step:?}: {branched:?}");
        assert!(daemon.client().snapshot("half").await.is_err(), "{step:?}");
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_sandbox_is_deleted_while_it_goes_back() {
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
        let held = daemon.faults().inject(step, Fault::Hold);
        let working = async {
            match step {
                Step::Checkpoint | Step::CheckpointTaken => keep(&daemon, &sandbox, "b").await,
                _ => go_back(&daemon, &sandbox, "a").await,
            }
        };
        let deleting = async {
            daemon.faults().reached(&held).await;
            daemon.client().kill(&sandbox.id).await.unwrap();
        };
        let (worked, ()) = tokio::join!(working, deleting);
        assert!(worked.is_err(), "{step:?}");
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_snapshot_may_go_while_its_children_live() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    source.branch("mid", BranchMode::Diff).await.unwrap();
    let child = daemon.child("mid").await;
    daemon
        .client()
        .delete_snapshot("mid", false, true)
        .await
        .unwrap();
    assert_eq!(child.read("/mark").await.unwrap(), "parent\n");
    let grandchildren = child.fork(1).await.unwrap();
    assert_eq!(grandchildren[0].read("/mark").await.unwrap(), "parent\n");
    daemon.ends_clean().await;
}

/// A parent that hangs keeps its place among the builds until its tag is deleted.
#[tokio::test]
async fn a_parent_is_deleted_while_it_boots() {
    let daemon = daemon_with(Options::args(&["--max-builds", "1"])).await;
    let held = daemon.faults().inject(Step::Boot, Fault::Hold);
    let deleting = async {
        daemon.faults().reached(&held).await;
        let error = daemon.parent("other").await.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::LimitReached), "{error}");
        let client = daemon.client();
        client.delete_snapshot("hung", false, false).await.unwrap();
        daemon.parent("other").await.unwrap();
    };
    let (built, ()) = tokio::join!(daemon.parent("hung"), deleting);
    let error = built.unwrap_err();
    assert_eq!(error.code(), Some(ErrorCode::WrongState), "{error}");
    assert_eq!(daemon.tags().await, ["other", TAG]);
    daemon.ends_clean().await;
}

/// From the cut on, the content of the snapshot is on its way into the store.
#[tokio::test]
async fn a_parent_is_not_cancelled_while_it_is_cut() {
    let daemon = daemon().await;
    let held = daemon.faults().inject(Step::CutTaken, Fault::Hold);
    let deleting = async {
        daemon.faults().reached(&held).await;
        let deleted = daemon.client().delete_snapshot("late", false, false).await;
        let error = deleted.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::SnapshotNotReady), "{error}");
        daemon.faults().release(&held);
    };
    let (built, ()) = tokio::join!(daemon.parent("late"), deleting);
    built.unwrap();
    daemon.ends_clean().await;
}
