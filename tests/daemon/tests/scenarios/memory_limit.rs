//! A cut leaves a source room above its memory limit.

use forkd_api::{BranchMode, CreateSandboxes, LimitsRequest};
use forkd_daemon_tests::fake::{Fault, Step};
use forkd_daemon_tests::{Daemon, Sandbox};

use crate::checkpoint::keep;
use crate::{TAG, daemon};

const LIMIT_MIB: u64 = 80;
const LIMIT: u64 = LIMIT_MIB << 20;

async fn limited(daemon: &Daemon) -> Sandbox {
    let request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        limits: LimitsRequest {
            memory_mib: Some(LIMIT_MIB),
            ..LimitsRequest::default()
        },
        ..CreateSandboxes::default()
    };
    let made = daemon.client().spawn(&request).await.unwrap();
    Sandbox::running(daemon.client(), &made).pop().unwrap()
}

/// The limits that were set since the last look: first more than the limit of the source, then that.
fn raised_and_lowered(daemon: &Daemon, seen: &mut usize) {
    let set = daemon.limits_set();
    let [raised, lowered] = set[*seen..] else {
        panic!("{set:?}");
    };
    assert!(raised > LIMIT, "{set:?}");
    assert_eq!(lowered, LIMIT, "{set:?}");
    *seen = set.len();
}

#[tokio::test]
async fn every_cut_raises_the_limit_and_restores_it() {
    let daemon = daemon().await;
    let source = limited(&daemon).await;
    let mut seen = daemon.limits_set().len();
    for mode in [BranchMode::Live, BranchMode::Full] {
        source.branch(&format!("{mode:?}"), mode).await.unwrap();
        raised_and_lowered(&daemon, &mut seen);
    }
    source.fork(1).await.unwrap();
    raised_and_lowered(&daemon, &mut seen);
    keep(&daemon, &source, "c").await.unwrap();
    raised_and_lowered(&daemon, &mut seen);
    daemon.faults().inject(Step::Cut, Fault::Fail);
    source.branch("failed", BranchMode::Live).await.unwrap_err();
    raised_and_lowered(&daemon, &mut seen);
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_sandbox_without_a_limit_needs_no_room() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    source.branch("b", BranchMode::Live).await.unwrap();
    assert_eq!(daemon.limits_set(), [0; 0]);
    daemon.ends_clean().await;
}

#[tokio::test]
async fn the_next_daemon_restores_a_limit_that_a_cut_had_raised() {
    let mut daemon = daemon().await;
    let source = limited(&daemon).await;
    let held = daemon.faults().inject(Step::Cut, Fault::Hold);
    {
        let cut = source.branch("b", BranchMode::Live);
        let killed = async {
            daemon.faults().reached(&held).await;
        };
        tokio::select! {
            cut = cut => panic!("{cut:?}"),
            () = killed => {}
        }
    }
    assert!(*daemon.limits_set().last().unwrap() > LIMIT);
    daemon.kill().await;
    daemon.faults().release(&held);
    daemon.launch().await;
    assert_eq!(daemon.limits_set().last(), Some(&LIMIT));
    daemon.ends_clean().await;
}
