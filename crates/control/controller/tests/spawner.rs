//! Commands that the daemon sends to `forkd-spawn`.

mod local;
mod published;
mod stand_in;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use forkd_api::ErrorCode;
use forkd_sandboxes::ops::spawn::{CreateRequest, create, ready, start};
use forkd_store::Manifest;
use forkd_types::{Digest, SandboxId};
use forkd_vmm_proto::spawn::{
    Limits, MAX_BATCH, PoolStatus, SpawnCommand, SpawnError, SpawnReply, SpawnStatus, Vm,
};
use forkd_vmm_proto::{Capabilities, Shape};
use local::app;
use published::publish;
use stand_in::{stand_in, stand_in_with_fds};

fn shape(manifest: &Manifest, memory_mib: u32) -> Shape {
    forkd_sandboxes::launch::shape(manifest.engine, memory_mib, manifest.vcpus, manifest.cpu)
}

fn children(manifest: &Manifest, count: usize) -> CreateRequest {
    CreateRequest {
        tag: manifest.tag.clone(),
        count,
        owner: "me".into(),
        expires_at_unix: None,
        on_expiry: Default::default(),
        memory_limit_mib: None,
        limits: forkd_sandboxes::host_limits::HostLimits::default(),
        network: forkd_types::Policy::none(),
        labels: BTreeMap::new(),
        env: BTreeMap::new(),
        metadata: BTreeMap::new(),
        workspace: None,
        id: None,
        ports: Default::default(),
        per_child_netns: false,
        volumes: Vec::new(),
    }
}

#[tokio::test]
async fn children_of_a_batch_that_failed_are_all_ended() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let manifest = publish(&app, "base", "sb-1");
    let asked = Arc::new(Mutex::new((Vec::new(), Vec::new())));
    let noted = Arc::clone(&asked);
    stand_in(&dir.path().join("run/spawn.sock"), move |command| {
        let (taken, killed): &mut (Vec<SandboxId>, Vec<SandboxId>) = &mut noted.lock().unwrap();
        match command {
            SpawnCommand::Take { ids, .. } => {
                let first = taken.is_empty();
                taken.extend(ids);
                if first {
                    return Ok(SpawnReply::Taken(Vec::new()));
                }
                Err(SpawnError::ShellFailed {
                    reason: "no memory".into(),
                })
            }
            SpawnCommand::Kill { id } => {
                killed.push(id);
                Ok(SpawnReply::Done)
            }
            // The pool is set when the last child has failed.
            _ => Ok(SpawnReply::Done),
        }
    });
    let request = children(&manifest, MAX_BATCH + 1);
    let children = start(&app, request).await.unwrap();
    assert!(ready(&children).await.is_err());
    let last = children.last().unwrap().failure().unwrap().chain();
    assert!(last.contains("no memory"), "{last}");
    for child in &children {
        child.gone.cancelled().await;
    }
    let (taken, killed) = &mut *asked.lock().unwrap();
    assert_eq!(taken.len(), MAX_BATCH + 1);
    taken.sort();
    killed.sort();
    assert_eq!(taken, killed);
    assert!(app.sandboxes.is_empty());
}

#[tokio::test]
async fn a_snapshot_of_another_engine_is_refused_before_a_vm_is_started() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let foreign = Manifest {
        tag: "foreign".parse().unwrap(),
        engine: "other".parse().unwrap(),
        ..publish(&app, "base", "sb-1")
    };
    let manifest = foreign.clone();
    app.store.publish(foreign).unwrap();
    stand_in(&dir.path().join("run/spawn.sock"), |command| {
        panic!("{command:?}")
    });
    let request = children(&manifest, 1);
    let error = create(&app, request).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::SnapshotIncompatible);
    assert!(error.chain().contains("other"), "{}", error.chain());
}

#[tokio::test]
async fn a_memory_limit_that_cannot_be_kept_refuses_the_request() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let manifest = publish(&app, "base", "sb-1");
    stand_in(
        &dir.path().join("run/spawn.sock"),
        |command| match command {
            SpawnCommand::Take { limits, .. } => {
                assert_eq!(limits.memory_bytes, Some(64 << 20));
                Err(SpawnError::NoWall {
                    wall: "the memory limit".into(),
                    reason: "no cgroup v2".into(),
                })
            }
            SpawnCommand::Kill { id } => Err(SpawnError::Unknown { id }),
            other => panic!("{other:?}"),
        },
    );
    let request = CreateRequest {
        memory_limit_mib: Some(64),
        ..children(&manifest, 1)
    };
    let error = create(&app, request).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unsupported);
    assert!(
        error.chain().contains("the memory limit"),
        "{}",
        error.chain()
    );
    assert!(app.sandboxes.list().is_empty());
}

/// A `forkd-spawn` that was started anew does not know the VM. The VM must not live on while its sandbox is reported as
/// deleted.
#[tokio::test]
async fn a_vm_that_forkd_spawn_does_not_know_is_ended_by_its_pidfd() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let manifest = publish(&app, "base", "sb-1");
    let shape = shape(&manifest, 64);
    let mut vmm = std::process::Command::new("/bin/sleep")
        .arg("1000")
        .spawn()
        .unwrap();
    let pid = rustix::process::Pid::from_child(&vmm);
    let (control, _kept) = forkd_channel::Channel::pair().unwrap();
    let mut control = Some(control);
    stand_in_with_fds(
        &dir.path().join("run/spawn.sock"),
        move |command| match command {
            SpawnCommand::Take { ids, shape, .. } => {
                let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
                let vm = Vm {
                    id: ids[0].clone(),
                    pid: 1,
                    shape,
                    capabilities: Capabilities::all(),
                    pooled: true,
                };
                let fds = vec![control.take().unwrap().into(), pidfd.unwrap()];
                (Ok(SpawnReply::Taken(vec![vm])), fds)
            }
            SpawnCommand::Kill { id } => (Err(SpawnError::Unknown { id }), Vec::new()),
            other => panic!("{other:?}"),
        },
    );
    let id = SandboxId::from_parts(1, 1);
    let ids = std::slice::from_ref(&id);
    let taken = app.launcher.take(shape, ids, &Limits::default()).await;
    assert_eq!(taken.unwrap().len(), 1);
    app.launcher.kill(&id).await.unwrap();
    let status = vmm.try_wait().unwrap();
    assert!(status.is_some_and(|status| !status.success()), "{status:?}");
}

#[tokio::test]
async fn shells_of_the_shape_used_last_stand_ready_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let manifest = publish(&app, "base", "sb-1");
    let [old, small, large] = [64, 128, 256].map(|mib| shape(&manifest, mib));
    // What an earlier daemon asked for.
    let depths = Arc::new(Mutex::new(vec![(old, 8)]));
    let noted = Arc::clone(&depths);
    stand_in(&dir.path().join("run/spawn.sock"), move |command| {
        let mut depths = noted.lock().unwrap();
        match command {
            SpawnCommand::SetPool { shape, depth } => {
                depths.retain(|(found, _)| *found != shape);
                if depth > 0 {
                    depths.push((shape, depth));
                }
                Ok(SpawnReply::Done)
            }
            SpawnCommand::Status => {
                let pool = |(shape, depth): &(Shape, u32)| PoolStatus {
                    shape: *shape,
                    depth: *depth,
                    ready: 0,
                    making: 0,
                };
                Ok(SpawnReply::Status(SpawnStatus {
                    pools: depths.iter().map(pool).collect(),
                    live: 0,
                    shells_lost: 0,
                }))
            }
            other => panic!("{other:?}"),
        }
    });
    for shape in [small, small, large, small] {
        app.launcher.keep_ready(shape, 4).await.unwrap();
        assert_eq!(*depths.lock().unwrap(), [(shape, 4)]);
    }
}

#[tokio::test]
async fn a_release_that_failed_is_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let app = app(dir.path());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&asked);
    stand_in(&dir.path().join("run/spawn.sock"), move |command| {
        let SpawnCommand::Release { names } = command else {
            panic!("{command:?}");
        };
        let mut asked = noted.lock().unwrap();
        asked.push(names);
        match asked.len() {
            1 => Err(SpawnError::ShellFailed {
                reason: "not now".into(),
            }),
            _ => Ok(SpawnReply::Done),
        }
    });
    let name = Digest([7; 32]);
    assert!(app.launcher.release(vec![name]).await.is_err());
    app.launcher.release(Vec::new()).await.unwrap();
    app.launcher.release(Vec::new()).await.unwrap();
    assert_eq!(*asked.lock().unwrap(), [[name], [name]]);
}
