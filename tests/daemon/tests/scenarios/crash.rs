//! The daemon dies by `SIGKILL` and another takes over: nothing that was acknowledged is lost, nothing else is left.

use std::time::Duration;

use forkd_api::BranchMode;
use forkd_daemon_tests::fake::{Fault, Injected, Step};
use forkd_daemon_tests::{Daemon, Sandbox};
use rand::RngExt;

use crate::checkpoint::{go_back, keep};
use crate::{TAG, daemon};

/// How often the daemon is killed at a random moment.
const ROUNDS: usize = 12;

/// Kills the daemon once a VMM is held, releases the VMM, and starts another daemon.
async fn killed_at(daemon: &mut Daemon, held: &Injected) {
    daemon.faults().reached(held).await;
    daemon.kill().await;
    daemon.faults().release(held);
    daemon.launch().await;
}

/// A request that is under way in the background, so that the daemon can be killed meanwhile.
async fn in_background<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) {
    tokio::spawn(work);
    tokio::task::yield_now().await;
}

#[tokio::test]
async fn a_child_that_was_not_ready_leaves_nothing() {
    let mut daemon = daemon().await;
    let witness = daemon.child(TAG).await;
    witness.write("/kept", "kept").await.unwrap();
    for step in [Step::Prepare, Step::Restore, Step::Connect, Step::Identity] {
        let held = daemon.faults().inject(step, Fault::Hold);
        let client = daemon.client().clone();
        in_background(async move {
            let request = forkd_api::CreateSandboxes {
                snapshot_tag: TAG.to_owned(),
                n: 1,
                ..Default::default()
            };
            client.spawn(&request).await.map(drop)
        })
        .await;
        killed_at(&mut daemon, &held).await;
        let witness = Sandbox::new(daemon.client(), &witness.id);
        let listed = daemon.sandboxes().await;
        assert_eq!(listed.len(), 1, "{step:?}: {listed:?}");
        assert_eq!(witness.read("/kept").await.unwrap(), "kept", "{step:?}");
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_source_survives_the_daemon_at_every_step_of_a_branch() {
    let mut daemon = daemon().await;
    let id = daemon.child(TAG).await.id;
    for step in Step::OF_A_CUT {
        for mode in [BranchMode::Full, BranchMode::Diff] {
            let what = format!("{mode:?} at {step:?}");
            let source = Sandbox::new(daemon.client(), &id);
            source.write("/kept", &what).await.unwrap();
            let held = daemon.faults().inject(step, Fault::Hold);
            in_background(async move { source.branch("half", mode).await.map(drop) }).await;
            killed_at(&mut daemon, &held).await;
            let source = Sandbox::new(daemon.client(), &id);
            assert_eq!(source.read("/kept").await.unwrap(), what);
            assert!(daemon.client().snapshot("half").await.is_err(), "{what}");
            source.branch("whole", mode).await.expect(&what);
            let child = daemon.child("whole").await;
            assert_eq!(child.read("/kept").await.unwrap(), what);
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
async fn a_checkpoint_survives_the_daemon() {
    let mut daemon = daemon().await;
    let sandbox = daemon.child(TAG).await;
    sandbox.write("/state", "a").await.unwrap();
    keep(&daemon, &sandbox, "a").await.unwrap();
    sandbox.write("/state", "b").await.unwrap();
    daemon.restart().await;
    let sandbox = Sandbox::new(daemon.client(), &sandbox.id);
    assert_eq!(sandbox.read("/state").await.unwrap(), "b");
    go_back(&daemon, &sandbox, "a").await.unwrap();
    assert_eq!(sandbox.read("/state").await.unwrap(), "a");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_roll_back_that_was_under_way_is_finished() {
    let mut daemon = daemon().await;
    let sandbox = daemon.child(TAG).await;
    sandbox.write("/state", "a").await.unwrap();
    keep(&daemon, &sandbox, "a").await.unwrap();
    for step in [Step::Rollback, Step::RolledBack] {
        let sandbox = Sandbox::new(daemon.client(), &sandbox.id);
        sandbox.write("/state", "b").await.unwrap();
        let held = daemon.faults().inject(step, Fault::Hold);
        let client = daemon.client().clone();
        let id = sandbox.id.clone();
        in_background(async move {
            let request = forkd_api::RollbackRequest {
                to: Some("a".to_owned()),
            };
            client.rollback(&id, &request).await.map(drop)
        })
        .await;
        killed_at(&mut daemon, &held).await;
        let sandbox = Sandbox::new(daemon.client(), &sandbox.id);
        forkd_daemon_tests::until(&format!("{step:?} is finished"), async || {
            let state = sandbox.read("/state").await.ok()?;
            (state == "a" && sandbox.runs().await).then_some(())
        })
        .await;
    }
    daemon.ends_clean().await;
}

/// Results that a worker was promised before the daemon died.
#[derive(Debug, Default)]
struct Promised {
    /// Ids, and the content of `/mark` where it is certain.
    sandboxes: Vec<(String, Option<String>)>,
    /// Tags, and the content of `/mark`.
    tags: Vec<(String, String)>,
}

/// Works until the daemon is gone.
async fn work(client: forkd_rest_client::Client, name: String) -> Promised {
    let mut promised = Promised::default();
    for round in 0.. {
        let request = forkd_api::CreateSandboxes {
            snapshot_tag: TAG.to_owned(),
            ..Default::default()
        };
        let Ok(made) = client.spawn(&request).await else {
            break;
        };
        let sandbox = Sandbox::new(&client, &made[0].id);
        promised.sandboxes.push((sandbox.id.clone(), None));
        let text = format!("{name} {round}");
        let written = sandbox.write("/mark", &text).await;
        if let Some(last) = promised.sandboxes.last_mut() {
            // Whether the guest has what was not acknowledged is open.
            last.1 = written.is_ok().then(|| text.clone());
        }
        if written.is_err() {
            break;
        }
        let tag = format!("{name}-{round}");
        if sandbox.branch(&tag, BranchMode::Live).await.is_err() {
            break;
        }
        promised.tags.push((tag, text));
    }
    promised
}

#[tokio::test]
async fn a_daemon_killed_at_random_keeps_its_promises() {
    let mut daemon = daemon().await;
    for round in 0..ROUNDS {
        let workers: Vec<_> = (0..4)
            .map(|worker| {
                let name = format!("r{round}w{worker}");
                tokio::spawn(work(daemon.client().clone(), name))
            })
            .collect();
        let moment = rand::rng().random_range(20..600);
        tokio::time::sleep(Duration::from_millis(moment)).await;
        daemon.kill().await;
        let mut promised = Promised::default();
        for worker in workers {
            let part = worker.await.unwrap();
            promised.sandboxes.extend(part.sandboxes);
            promised.tags.extend(part.tags);
        }
        daemon.launch().await;
        for (id, text) in &promised.sandboxes {
            let sandbox = Sandbox::new(daemon.client(), id);
            let found = sandbox.read("/mark").await.unwrap();
            assert_eq!(
                found,
                text.clone().unwrap_or_else(|| found.clone()),
                "round {round}"
            );
            daemon.client().kill(id).await.unwrap();
        }
        for (tag, text) in &promised.tags {
            let child = daemon.child(tag).await;
            assert_eq!(child.read("/mark").await.unwrap(), *text, "round {round}");
            daemon.client().kill(&child.id).await.unwrap();
        }
        for tag in daemon.tags().await {
            if tag != TAG {
                daemon
                    .client()
                    .delete_snapshot(&tag, false, true)
                    .await
                    .unwrap();
            }
        }
    }
    daemon.ends_clean().await;
}
