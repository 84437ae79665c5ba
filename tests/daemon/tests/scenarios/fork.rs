//! Forks of a running sandbox.

use forkd_daemon_tests::fake::{Fault, Step};

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
