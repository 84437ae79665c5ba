//! Children of a snapshot.

use std::collections::BTreeSet;

use forkd_api::{CreateSandboxes, SandboxState};
use forkd_daemon_tests::fake::{Fault, Step};
use forkd_daemon_tests::{Options, Sandbox, until};

use crate::{TAG, daemon, daemon_with};

async fn spawns(n: u32) {
    let daemon = daemon().await;
    let children = daemon.spawn(TAG, n).await.unwrap();
    let ids: BTreeSet<&str> = children.iter().map(|child| child.id.as_str()).collect();
    assert_eq!(ids.len(), n as usize);
    for child in &children {
        assert_eq!(child.read("/mark").await.unwrap(), "parent\n");
        child.write("/own", &child.id).await.unwrap();
    }
    let names: BTreeSet<_> = daemon
        .sandboxes()
        .await
        .into_iter()
        .map(|info| info.hostname.unwrap())
        .collect();
    assert_eq!(names.len(), n as usize, "each child has its own host name");
    for child in &children {
        assert_eq!(child.read("/own").await.unwrap(), child.id);
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn one_child() {
    spawns(1).await;
}

#[tokio::test]
async fn ten_children() {
    spawns(10).await;
}

#[tokio::test]
async fn a_hundred_children() {
    spawns(100).await;
}

#[tokio::test]
async fn a_child_that_does_not_start_leaves_nothing_and_hurts_no_other() {
    let daemon = daemon_with(Options::args(&["--ready-timeout", "5s"])).await;
    let witness = daemon.child(TAG).await;
    for step in [
        Step::Hello,
        Step::Prepare,
        Step::Restore,
        Step::Connect,
        Step::Identity,
    ] {
        for fault in [Fault::Fail, Fault::Die, Fault::Garbage] {
            let what = format!("{fault:?} at {step:?}");
            daemon.faults().inject_after(1, step, fault);
            let request = CreateSandboxes {
                snapshot_tag: TAG.to_owned(),
                n: 3,
                ..CreateSandboxes::default()
            };
            let made = daemon.client().spawn(&request).await;
            daemon.faults().clear();
            match &made {
                Err(error) => assert!(error.code().is_some(), "{what}: {error}"),
                Ok(children) => {
                    let failed: Vec<_> = children
                        .iter()
                        .filter(|info| info.state != SandboxState::Running)
                        .collect();
                    assert_eq!(failed.len(), 1, "{what}: {children:?}");
                    assert!(failed[0].error.is_some(), "{what}: {failed:?}");
                    for child in Sandbox::running(daemon.client(), children) {
                        assert!(child.runs().await, "{what}");
                        assert_eq!(child.read("/mark").await.unwrap(), "parent\n", "{what}");
                    }
                }
            }
            for info in daemon.sandboxes().await {
                if info.id != witness.id {
                    daemon.client().kill(&info.id).await.unwrap();
                }
            }
            until(&format!("{what}: only the witness is left"), async || {
                (daemon.leftovers().vmms.len() == 1).then_some(())
            })
            .await;
            assert_eq!(witness.read("/mark").await.unwrap(), "parent\n", "{what}");
        }
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_parent_that_does_not_come_up_leaves_no_snapshot() {
    let daemon = daemon().await;
    for (step, fault) in [
        (Step::Boot, Fault::Fail),
        (Step::Boot, Fault::Die),
        (Step::Boot, Fault::Garbage),
        (Step::Connect, Fault::Fail),
        (Step::Exec, Fault::Fail),
        (Step::Exec, Fault::Die),
        (Step::Cut, Fault::Fail),
        (Step::CutTaken, Fault::Die),
        (Step::CutWritten, Fault::Fail),
    ] {
        daemon.faults().inject(step, fault);
        let error = daemon.parent("other").await.unwrap_err();
        assert!(error.code().is_some(), "{fault:?} at {step:?}: {error}");
        let ready = daemon.client().snapshot("other").await;
        assert!(ready.is_err(), "{fault:?} at {step:?} left a snapshot");
        until("the parent's VMM ends", async || {
            daemon.leftovers().vmms.is_empty().then_some(())
        })
        .await;
    }
    daemon.parent("other").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_guest_that_powers_off_is_a_failed_sandbox_until_it_is_deleted() {
    let daemon = daemon().await;
    let child = daemon.child(TAG).await;
    let ended = child.run(&["poweroff", "-f"]).await;
    assert!(ended.is_err(), "{ended:?}");
    let info = until("the end is noticed", async || {
        child
            .info()
            .await
            .filter(|info| info.state == SandboxState::Failed)
    })
    .await;
    assert!(info.error.is_some());
    let again = Sandbox::new(daemon.client(), &child.id);
    assert!(again.read("/mark").await.is_err());
    daemon.ends_clean().await;
}

#[tokio::test]
async fn the_first_ready_child_works_while_the_last_one_starts() {
    let daemon = daemon_with(Options::args(&["--ready-timeout", "10m"])).await;
    let held = daemon.faults().inject_after(50, Step::Restore, Fault::Hold);
    let working = async {
        daemon.faults().reached(&held).await;
        let ready = until("all children but one run", async || {
            let listed = daemon.sandboxes().await;
            let running = Sandbox::running(daemon.client(), &listed);
            (running.len() == 99).then_some(running)
        })
        .await;
        for child in &ready[..3] {
            child.write("/early", "early").await.unwrap();
            assert_eq!(child.read("/early").await.unwrap(), "early");
        }
        let forked = ready[0].fork(1).await.unwrap();
        assert_eq!(forked[0].read("/early").await.unwrap(), "early");
        daemon.client().kill(&ready[1].id).await.unwrap();
        daemon.faults().release(&held);
    };
    let (made, ()) = tokio::join!(daemon.spawn(TAG, 100), working);
    assert!(made.unwrap().len() >= 99);
    daemon.ends_clean().await;
}
