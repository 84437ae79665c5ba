//! Volumes while the daemon dies by `SIGKILL` at every step: no data is lost, no volume stays locked, nothing is left.

use forkd_api::{CreateSandboxes, RollbackRequest, VolumeMode};
use forkd_daemon_tests::fake::{Fault, Injected, Step};
use forkd_daemon_tests::{Daemon, Sandbox};

use crate::checkpoint::keep;
use crate::volumes::{code, create, delete, freed, mount, one, start};
use crate::{TAG, daemon};

/// Kills the daemon once a VMM is held, releases the VMM, and starts another daemon.
async fn killed_at(daemon: &mut Daemon, held: &Injected) {
    daemon.faults().reached(held).await;
    daemon.kill().await;
    daemon.faults().release(held);
    daemon.launch().await;
}

async fn in_background<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) {
    tokio::spawn(work);
    tokio::task::yield_now().await;
}

#[tokio::test]
async fn a_start_that_was_under_way_frees_the_volume() {
    let mut daemon = daemon().await;
    create(&daemon, "data").await;
    let steps = [Step::Restore, Step::AttachDisk, Step::Identity, Step::Mount];
    for step in steps {
        let held = daemon.faults().inject(step, Fault::Hold);
        let client = daemon.client().clone();
        in_background(async move {
            let request = CreateSandboxes {
                snapshot_tag: TAG.to_owned(),
                volumes: vec![mount("data", VolumeMode::Rw)],
                ..CreateSandboxes::default()
            };
            client.spawn(&request).await.map(drop)
        })
        .await;
        killed_at(&mut daemon, &held).await;
        let info = daemon.client().volume("data").await.unwrap();
        assert_eq!((info.writer, info.generation), (None, 1), "{step:?}");
        assert!(daemon.sandboxes().await.is_empty(), "{step:?}");
    }
    for step in [Step::AttachDisk, Step::Mount] {
        daemon.faults().inject(step, Fault::Fail);
        let refused = start(&daemon, 1, vec![mount("data", VolumeMode::Rw)]).await;
        assert!(refused.is_err(), "{step:?}");
        freed(&daemon).await;
    }
    let writer = one(&daemon, "data", VolumeMode::Rw).await;
    delete(&daemon, writer).await;
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_commit_that_was_under_way_leaves_a_sandbox_that_writes() {
    let mut daemon = daemon().await;
    create(&daemon, "data").await;
    let id = one(&daemon, "data", VolumeMode::Clone).await.id;
    let steps = [
        Step::HoldWrites,
        Step::Cut,
        Step::CutTaken,
        Step::CutWritten,
    ];
    for (round, step) in (2..).zip(steps) {
        let what = format!("{step:?}");
        let source = Sandbox::new(daemon.client(), &id);
        source.write("/data/a", &what).await.unwrap();
        let before = daemon.client().volume("data").await.unwrap().generation;
        let held = daemon.faults().inject(step, Fault::Hold);
        let (client, committed) = (daemon.client().clone(), id.clone());
        in_background(async move { client.commit_volume(&committed, "data").await.map(drop) })
            .await;
        killed_at(&mut daemon, &held).await;
        let info = daemon.client().volume("data").await.unwrap();
        assert_eq!(info.generation, before, "{what}");
        let source = Sandbox::new(daemon.client(), &id);
        forkd_daemon_tests::until("writes go on", async || {
            source.read("/run/held/data").await.is_err().then_some(())
        })
        .await;
        assert_eq!(source.read("/data/a").await.unwrap(), what);
        let made = daemon.client().commit_volume(&id, "data").await.unwrap();
        assert_eq!(made.generation, round, "{what}");
        assert_eq!(daemon.tags().await, [TAG]);
    }
    let source = Sandbox::new(daemon.client(), &id);
    delete(&daemon, source).await;
    let reader = one(&daemon, "data", VolumeMode::Ro).await;
    assert_eq!(reader.read("/data/a").await.unwrap(), "CutWritten");
    delete(&daemon, reader).await;
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_commit_that_fails_lets_writes_go_on() {
    let daemon = daemon().await;
    create(&daemon, "data").await;
    let clone = one(&daemon, "data", VolumeMode::Clone).await;
    clone.write("/data/a", "a").await.unwrap();
    for step in [Step::HoldWrites, Step::Cut, Step::CutTaken] {
        daemon.faults().inject(step, Fault::Fail);
        let failed = daemon.client().commit_volume(&clone.id, "data").await;
        assert!(code(failed).is_some(), "{step:?}");
        assert!(clone.read("/run/held/data").await.is_err(), "{step:?}");
    }
    let made = daemon.client().commit_volume(&clone.id, "data").await;
    assert_eq!(made.unwrap().generation, 2);
    delete(&daemon, clone).await;
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_deletion_that_was_under_way_keeps_the_data() {
    let mut daemon = daemon().await;
    create(&daemon, "data").await;
    for step in [Step::HoldWrites, Step::Stop] {
        let what = format!("{step:?}");
        let writer = one(&daemon, "data", VolumeMode::Rw).await;
        writer.write("/data/a", &what).await.unwrap();
        let held = daemon.faults().inject(step, Fault::Hold);
        let (client, id) = (daemon.client().clone(), writer.id.clone());
        in_background(async move { client.kill(&id).await.map(drop) }).await;
        killed_at(&mut daemon, &held).await;
        // Before the deletion is recorded the sandbox goes on; after it the next daemon finishes the deletion.
        let left = Sandbox::new(daemon.client(), &writer.id);
        if left.info().await.is_some() {
            delete(&daemon, left).await;
        }
        freed(&daemon).await;
        let reader = one(&daemon, "data", VolumeMode::Ro).await;
        assert_eq!(reader.read("/data/a").await.unwrap(), what);
        delete(&daemon, reader).await;
    }
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

/// The daemon, its helpers and the VM die at once, as in a power failure. A live fork came before: its layers must not be
/// in memory only.
#[tokio::test]
async fn a_fork_does_not_make_written_data_volatile() {
    let mut daemon = daemon().await;
    create(&daemon, "data").await;
    let writer = one(&daemon, "data", VolumeMode::Rw).await;
    writer.write("/data/a", "before the fork").await.unwrap();
    let forks = writer.fork(1).await.unwrap();
    writer.write("/data/b", "after the fork").await.unwrap();
    let mut processes = daemon.helpers();
    for sandbox in forks.iter().chain([&writer]) {
        processes.extend(sandbox.info().await.unwrap().pid);
    }
    daemon.kill().await;
    processes.into_iter().for_each(Daemon::kill_process);
    daemon.launch().await;
    freed(&daemon).await;
    let reader = one(&daemon, "data", VolumeMode::Ro).await;
    assert_eq!(reader.read("/data/a").await.unwrap(), "before the fork");
    assert_eq!(reader.read("/data/b").await.unwrap(), "after the fork");
    for info in daemon.sandboxes().await {
        daemon.client().kill(&info.id).await.unwrap();
    }
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

/// Which state the VMM wrote its newest layer over is unknown then.
#[tokio::test]
async fn a_roll_back_cut_off_by_both_deaths_leaves_the_checkpoint() {
    let mut daemon = daemon().await;
    create(&daemon, "data").await;
    let writer = one(&daemon, "data", VolumeMode::Rw).await;
    writer.write("/data/a", "kept").await.unwrap();
    keep(&daemon, &writer, "point").await.unwrap();
    writer.write("/data/a", "dropped").await.unwrap();
    let held = daemon.faults().inject(Step::RolledBack, Fault::Hold);
    let pid = writer.info().await.unwrap().pid.unwrap();
    let (client, id) = (daemon.client().clone(), writer.id.clone());
    in_background(async move {
        let request = RollbackRequest {
            to: Some("point".to_owned()),
        };
        client.rollback(&id, &request).await.map(drop)
    })
    .await;
    daemon.faults().reached(&held).await;
    daemon.kill().await;
    Daemon::kill_process(pid);
    daemon.faults().release(&held);
    daemon.launch().await;
    freed(&daemon).await;
    let reader = one(&daemon, "data", VolumeMode::Ro).await;
    assert_eq!(reader.read("/data/a").await.unwrap(), "kept");
    delete(&daemon, reader).await;
    let failed = Sandbox::new(daemon.client(), &writer.id);
    delete(&daemon, failed).await;
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}
