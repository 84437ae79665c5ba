//! What the daemon says to `forkd-spawn`.

mod local;
mod published;
mod stand_in;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use forkd_controller::sandbox::create::{CreateRequest, create};
use forkd_store::Manifest;
use forkd_types::SandboxId;
use forkd_vmm_proto::Shape;
use forkd_vmm_proto::spawn::{
    MAX_BATCH, PoolStatus, SpawnCommand, SpawnError, SpawnReply, SpawnStatus,
};
use local::app;
use published::publish;
use stand_in::stand_in;

fn shape(manifest: &Manifest, memory_mib: u32) -> Shape {
    forkd_controller::launch::shape(memory_mib, manifest.vcpus, manifest.cpu)
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
            other => panic!("{other:?}"),
        }
    });
    let request = CreateRequest {
        tag: manifest.tag,
        count: MAX_BATCH + 1,
        owner: "me".into(),
        expires_at_unix: None,
        memory_limit_mib: None,
        labels: BTreeMap::new(),
        workspace: None,
        id: None,
    };
    let error = create(&app, request).await.unwrap_err();
    assert!(error.chain().contains("no memory"), "{}", error.chain());
    let (taken, killed) = &*asked.lock().unwrap();
    assert_eq!(taken.len(), MAX_BATCH + 1);
    assert_eq!(taken, killed);
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
