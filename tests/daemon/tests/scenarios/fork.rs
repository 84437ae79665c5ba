//! Forks of a running sandbox.

use forkd_daemon_tests::fake::{Fault, Step};

use forkd_api::{BranchMode, ErrorCode};
use forkd_daemon_tests::Sandbox;

use crate::{TAG, daemon};

#[tokio::test]
async fn children_know_what_the_source_knew_and_go_their_own_way() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    source.write("/before", "one").await.unwrap();
    let children = source.fork(3).await.unwrap();
    source.write("/after", "two").await.unwrap();
    for child in &children {
        assert_eq!(child.read("/mark").await.unwrap(), "parent\n");
        assert_eq!(child.read("/before").await.unwrap(), "one");
        assert!(child.read("/after").await.is_err());
        child.write("/before", "changed").await.unwrap();
    }
    assert_eq!(source.read("/before").await.unwrap(), "one");
    assert_eq!(daemon.tags().await, [TAG], "a fork has no tag");
    let grandchild = children[0].fork(1).await.unwrap();
    assert_eq!(grandchild[0].read("/before").await.unwrap(), "changed");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_fork_that_fails_leaves_the_source_running() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    source.write("/before", "one").await.unwrap();
    for step in Step::OF_A_CUT.into_iter().chain([Step::Restore]) {
        daemon.faults().inject(step, Fault::Fail);
        let forked = source.fork(2).await;
        daemon.faults().clear();
        if let Ok(children) = forked {
            for child in children {
                daemon.client().kill(&child.id).await.unwrap();
            }
        }
        assert_eq!(source.read("/before").await.unwrap(), "one", "{step:?}");
        let children = source.fork(1).await.unwrap();
        assert_eq!(children[0].read("/before").await.unwrap(), "one");
        daemon.client().kill(&children[0].id).await.unwrap();
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_live_fork_puts_nothing_into_the_store() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    let before = daemon.client().store().await.unwrap();
    let children = source.fork(2).await.unwrap();
    let after = daemon.client().store().await.unwrap();
    assert_eq!(before.blobs, after.blobs);
    assert!(!daemon.leftovers().kept.is_empty());
    // The content of the fork lives as long as a child or the source needs it.
    daemon.client().kill(&source.id).await.unwrap();
    let grandchild = children[0].fork(1).await.unwrap();
    assert_eq!(grandchild[0].read("/mark").await.unwrap(), "parent\n");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_chain_of_live_forks_has_no_end() {
    let daemon = daemon().await;
    let mut last = daemon.child(TAG).await;
    // More generations than memory may have layers, and several forks of each.
    for generation in 0..36 {
        last.write("/generation", &generation.to_string())
            .await
            .unwrap();
        let mut children = last.fork(1).await.unwrap();
        daemon.client().kill(&last.id).await.unwrap();
        last = children.remove(0);
        assert_eq!(
            last.read("/generation").await.unwrap(),
            generation.to_string()
        );
    }
    // More forks of one source than live cuts build on each other.
    for round in 0..20 {
        last.write("/round", &round.to_string()).await.unwrap();
        let child = last.fork(1).await.unwrap().remove(0);
        assert_eq!(child.read("/round").await.unwrap(), round.to_string());
        daemon.client().kill(&child.id).await.unwrap();
    }
    last.branch("end", BranchMode::Diff).await.unwrap();
    let child = daemon.child("end").await;
    assert_eq!(child.read("/generation").await.unwrap(), "35");
    assert_eq!(child.read("/round").await.unwrap(), "19");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_child_of_a_live_fork_survives_the_daemon() {
    let mut daemon = daemon().await;
    let source = daemon.child(TAG).await;
    source.write("/state", "a").await.unwrap();
    let child = source.fork(1).await.unwrap().remove(0).id;
    let source = source.id;
    daemon.kill().await;
    daemon.launch().await;
    let child = Sandbox::new(daemon.client(), &child);
    assert_eq!(child.read("/state").await.unwrap(), "a");
    child.write("/more", "b").await.unwrap();
    daemon.client().kill(&source).await.unwrap();
    // Both a fork and a branch build on the memory that the earlier daemon left.
    let grandchild = child.fork(1).await.unwrap().remove(0);
    assert_eq!(grandchild.read("/more").await.unwrap(), "b");
    grandchild
        .branch("durable", BranchMode::Diff)
        .await
        .unwrap();
    daemon.kill().await;
    daemon.launch().await;
    for sandbox in daemon.sandboxes().await {
        daemon.client().kill(&sandbox.id).await.unwrap();
    }
    forkd_daemon_tests::until("nothing volatile is left", async || {
        daemon.leftovers().kept.is_empty().then_some(())
    })
    .await;
    let again = daemon.child("durable").await;
    assert_eq!(again.read("/state").await.unwrap(), "a");
    assert_eq!(again.read("/more").await.unwrap(), "b");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_daemon_killed_at_any_step_of_a_live_fork_leaves_nothing() {
    let mut daemon = daemon().await;
    let id = daemon.child(TAG).await.id;
    for step in Step::OF_A_CUT.into_iter().chain([Step::Restore]) {
        let source = Sandbox::new(daemon.client(), &id);
        source.write("/kept", &format!("{step:?}")).await.unwrap();
        let held = daemon.faults().inject(step, Fault::Hold);
        tokio::spawn(async move { source.fork(1).await.map(drop) });
        daemon.faults().reached(&held).await;
        daemon.kill().await;
        daemon.faults().release(&held);
        daemon.launch().await;
        assert_eq!(daemon.sandboxes().await.len(), 1, "{step:?}");
        let source = Sandbox::new(daemon.client(), &id);
        let child = source.fork(1).await.unwrap().remove(0);
        assert_eq!(child.read("/kept").await.unwrap(), format!("{step:?}"));
        daemon.client().kill(&child.id).await.unwrap();
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_fork_that_no_engine_can_start_does_not_stop_the_source() {
    let mut daemon = daemon().await;
    let source = daemon.child(TAG).await;
    daemon.kill().await;
    let db = rusqlite::Connection::open(daemon.data().join("state.db")).unwrap();
    let change = "UPDATE sandboxes SET record = json_set(record, '$.engine', 'firecracker')";
    assert_eq!(db.execute(change, []).unwrap(), 1);
    drop(db);
    daemon.launch().await;
    let source = Sandbox::new(daemon.client(), &source.id);
    let refused = source.fork(1).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::SnapshotIncompatible));
    assert_eq!(source.info().await.unwrap().branch_count, 0, "it was cut");
    daemon.ends_clean().await;
}
