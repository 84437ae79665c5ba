//! Limits hold however many requests come at once.

use forkd_api::{BranchMode, ErrorCode};
use forkd_daemon_tests::Options;
use forkd_daemon_tests::fake::{Fault, Step};

use crate::{TAG, daemon_with};

const LIMIT: usize = 10;

#[tokio::test]
async fn sandboxes_of_a_daemon() {
    let daemon = daemon_with(Options::args(&["--max-sandboxes", "10"])).await;
    let all = futures::future::join_all((0..8).map(|_| daemon.spawn(TAG, 3))).await;
    let mut made = 0;
    for result in all {
        match result {
            Ok(children) => made += children.len(),
            Err(error) => assert_eq!(error.code(), Some(ErrorCode::LimitReached), "{error}"),
        }
    }
    assert!((1..=LIMIT).contains(&made), "{made} sandboxes");
    assert_eq!(daemon.sandboxes().await.len(), made);
    daemon.ends_clean().await;
}

#[tokio::test]
async fn branches_under_way() {
    let daemon = daemon_with(Options::args(&["--branch-concurrency", "1"])).await;
    let (first, second) = (daemon.child(TAG).await, daemon.child(TAG).await);
    let held = daemon.faults().inject(Step::CutTaken, Fault::Hold);
    let over = async {
        daemon.faults().reached(&held).await;
        let error = second.branch("second", BranchMode::Diff).await.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::LimitReached), "{error}");
        daemon.faults().release(&held);
    };
    let (branched, ()) = tokio::join!(first.branch("first", BranchMode::Diff), over);
    branched.unwrap();
    second.branch("second", BranchMode::Diff).await.unwrap();
    daemon.ends_clean().await;
}
