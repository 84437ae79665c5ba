//! Branches of a running sandbox, and everything that can go wrong with one.

use std::collections::BTreeMap;

use forkd_api::{BranchMode, UpdateSandbox};
use forkd_daemon_tests::fake::{Fault, Step};
use forkd_daemon_tests::{Daemon, Sandbox, until};

use crate::{TAG, daemon};

const MODES: [BranchMode; 3] = [BranchMode::Full, BranchMode::Diff, BranchMode::Live];

#[tokio::test]
async fn a_chain_of_branches_holds_each_state() {
    let daemon = daemon().await;
    let mut source = daemon.child(TAG).await;
    let mut tags = Vec::new();
    for round in 0..9 {
        source.write("/round", &round.to_string()).await.unwrap();
        source.write(&format!("/file{round}"), "x").await.unwrap();
        let tag = format!("round{round}");
        source.branch(&tag, MODES[round % 3]).await.unwrap();
        tags.push(tag);
        if round % 4 == 3 {
            // The next branches build on a child.
            source = daemon.child(&tags[round]).await;
        }
    }
    for (round, tag) in tags.iter().enumerate() {
        let child = daemon.child(tag).await;
        assert_eq!(child.read("/round").await.unwrap(), round.to_string());
        assert_eq!(child.read(&format!("/file{round}")).await.unwrap(), "x");
        assert!(child.read(&format!("/file{}", round + 1)).await.is_err());
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn more_branches_than_disk_layers_may_be_stacked() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    for round in 0..40 {
        source.write("/round", &round.to_string()).await.unwrap();
        let tag = format!("round{round}");
        source.branch(&tag, BranchMode::Live).await.unwrap();
    }
    let child = daemon.child("round39").await;
    assert_eq!(child.read("/round").await.unwrap(), "39");
    daemon.ends_clean().await;
}

/// A failed branch: the tag does not exist, nothing is staged.
async fn left_nothing(daemon: &Daemon, tag: &str, what: &str) {
    assert!(
        daemon.client().snapshot(tag).await.is_err(),
        "{what}: half a snapshot"
    );
    daemon.stages_nothing().await;
}

async fn goes_on(source: &Sandbox, what: &str) {
    assert_eq!(source.read("/kept").await.unwrap(), "kept", "{what}");
    source.write("/new", what).await.unwrap();
    assert_eq!(source.read("/new").await.unwrap(), what);
}

#[tokio::test]
async fn a_branch_that_is_refused_leaves_the_source_running() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    source.write("/kept", "kept").await.unwrap();
    for step in Step::OF_A_CUT {
        for mode in MODES {
            let what = format!("{mode:?} fails at {step:?}");
            daemon.faults().inject(step, Fault::Fail);
            let error = source.branch("half", mode).await.unwrap_err();
            assert!(error.code().is_some(), "{what}: {error}");
            left_nothing(&daemon, "half", &what).await;
            goes_on(&source, &what).await;
            source.branch("whole", mode).await.expect(&what);
            let child = daemon.child("whole").await;
            assert_eq!(child.read("/new").await.unwrap(), what);
            daemon.client().kill(&child.id).await.unwrap();
            daemon
                .client()
                .delete_snapshot("whole", false, true)
                .await
                .unwrap();
        }
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_vmm_that_dies_in_a_branch_takes_only_its_sandbox_along() {
    let daemon = daemon().await;
    let witness = daemon.child(TAG).await;
    witness.write("/kept", "kept").await.unwrap();
    for step in Step::OF_A_CUT {
        for fault in [Fault::Die, Fault::Garbage] {
            let what = format!("{fault:?} at {step:?}");
            let source = daemon.child(TAG).await;
            daemon.faults().inject(step, fault);
            let error = source.branch("half", BranchMode::Diff).await.unwrap_err();
            assert!(error.code().is_some(), "{what}: {error}");
            left_nothing(&daemon, "half", &what).await;
            until(&format!("{what}: the sandbox has failed"), async || {
                (!source.runs().await).then_some(())
            })
            .await;
            goes_on(&witness, &what).await;
            daemon.client().kill(&source.id).await.unwrap();
        }
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn two_branches_to_one_tag_make_one_snapshot() {
    let daemon = daemon().await;
    let (a, b) = (daemon.child(TAG).await, daemon.child(TAG).await);
    a.write("/who", "a").await.unwrap();
    b.write("/who", "b").await.unwrap();
    for round in 0..8 {
        let tag = format!("race{round}");
        let (first, second) = tokio::join!(
            a.branch(&tag, BranchMode::Live),
            b.branch(&tag, BranchMode::Live)
        );
        let winner = match (&first, &second) {
            (Ok(_), Err(_)) => "a",
            (Err(_), Ok(_)) => "b",
            other => panic!("one of two wins: {other:?}"),
        };
        let child = daemon.child(&tag).await;
        assert_eq!(child.read("/who").await.unwrap(), winner);
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn labels_that_change_during_a_branch_are_kept() {
    let mut daemon = daemon().await;
    let source = daemon.child(TAG).await;
    for round in 0..10 {
        let labels = BTreeMap::from([("round".to_owned(), round.to_string())]);
        let update = UpdateSandbox {
            labels: Some(labels.clone()),
            ..UpdateSandbox::default()
        };
        let tag = format!("round{round}");
        let held = daemon.faults().inject(Step::CutTaken, Fault::Hold);
        let (branched, updated) = tokio::join!(source.branch(&tag, BranchMode::Diff), async {
            daemon.faults().reached(&held).await;
            let updating = daemon.client().update(&source.id, &update);
            // A daemon may answer at once, or only after the branch.
            let releasing = async {
                tokio::task::yield_now().await;
                daemon.faults().release(&held);
            };
            tokio::join!(updating, releasing).0
        });
        branched.unwrap();
        updated.unwrap();
        let info = source.info().await.unwrap();
        assert_eq!(info.labels, labels, "round {round}");
        assert_eq!(info.branch_count, round + 1);
    }
    let before = source.info().await.unwrap();
    daemon.restart().await;
    let source = Sandbox::new(daemon.client(), &source.id);
    let after = source.info().await.unwrap();
    assert_eq!(
        (after.labels, after.branch_count),
        (before.labels, before.branch_count)
    );
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_snapshot_that_cannot_be_published_leaves_the_source_running() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    source.write("/kept", "kept").await.unwrap();
    let place = daemon.data().join("snapshots/taken");
    for mode in MODES {
        let what = format!("{mode:?} is not published");
        let held = daemon.faults().inject(Step::CutWritten, Fault::Hold);
        let in_the_way = async {
            daemon.faults().reached(&held).await;
            // Behind the daemon's back: it has looked whether the tag is free.
            std::fs::create_dir(&place).unwrap();
            std::fs::write(place.join("file"), "in the way").unwrap();
            daemon.faults().release(&held);
        };
        let (branched, ()) = tokio::join!(source.branch("taken", mode), in_the_way);
        branched.expect_err(&what);
        goes_on(&source, &what).await;
        assert_eq!(std::fs::read(place.join("file")).unwrap(), b"in the way");
        std::fs::remove_dir_all(&place).unwrap();
        source.branch("taken", mode).await.expect(&what);
        let child = daemon.child("taken").await;
        assert_eq!(child.read("/new").await.unwrap(), what);
        daemon.client().kill(&child.id).await.unwrap();
        daemon
            .client()
            .delete_snapshot("taken", false, true)
            .await
            .unwrap();
    }
    daemon.ends_clean().await;
}
