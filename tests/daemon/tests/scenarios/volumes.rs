//! Volumes: what a sandbox wrote outlives it, its VMM and the daemon, and no two sandboxes write one volume.

use forkd_api::{
    BranchMode, CreateSandboxes, CreateVolume, ErrorCode, SandboxState, VolumeMode, VolumeMount,
};
use forkd_daemon_tests::{Daemon, Options, Sandbox, programs, until};
use forkd_rest_client::Error;

use crate::checkpoint::{go_back, keep};
use crate::{TAG, daemon};

const SMALL: u64 = 16;

pub async fn create(daemon: &Daemon, name: &str) {
    let request = CreateVolume {
        name: name.to_owned(),
        size_mib: SMALL,
    };
    let made = daemon.client().create_volume(&request).await.unwrap();
    assert_eq!((made.generation, made.writer), (1, None));
}

pub fn mount(name: &str, mode: VolumeMode) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        path: "/data".to_owned(),
        mode,
    }
}

pub async fn start(
    daemon: &Daemon,
    n: u32,
    volumes: Vec<VolumeMount>,
) -> Result<Vec<Sandbox>, Error> {
    let request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        n,
        volumes,
        ..CreateSandboxes::default()
    };
    let answer = daemon.client().spawn(&request).await?;
    Ok(Sandbox::running(daemon.client(), &answer))
}

pub async fn one(daemon: &Daemon, name: &str, mode: VolumeMode) -> Sandbox {
    let mut started = start(daemon, 1, vec![mount(name, mode)]).await.unwrap();
    started.pop().expect("a sandbox runs")
}

pub async fn delete(daemon: &Daemon, sandbox: Sandbox) {
    daemon.client().kill(&sandbox.id).await.unwrap();
}

/// Waits until the volume has no writer: the daemon has taken over what the last one wrote.
pub async fn freed(daemon: &Daemon) {
    until("the volume has no writer", async || {
        let info = daemon.client().volume("data").await.unwrap();
        info.writer.is_none().then_some(())
    })
    .await;
}

pub fn code<T>(result: Result<T, Error>) -> Option<ErrorCode> {
    result.err().and_then(|error| error.code())
}

#[tokio::test]
async fn one_sandbox_writes_and_the_next_finds_it() {
    let daemon = daemon().await;
    create(&daemon, "data").await;
    let writer = one(&daemon, "data", VolumeMode::Rw).await;
    writer.write("/data/note", "first").await.unwrap();
    let second = start(&daemon, 1, vec![mount("data", VolumeMode::Rw)]).await;
    assert_eq!(code(second), Some(ErrorCode::VolumeInUse));
    let client = daemon.client();
    assert_eq!(
        code(client.delete_volume("data").await),
        Some(ErrorCode::VolumeInUse)
    );
    // Readers and clones see the volume as it was before the writer.
    let clone = one(&daemon, "data", VolumeMode::Clone).await;
    assert!(clone.read("/data/note").await.is_err());
    delete(&daemon, writer).await;
    let info = client.volume("data").await.unwrap();
    assert_eq!((info.generation, info.writer, info.layers), (2, None, 1));
    assert!(clone.read("/data/note").await.is_err());
    let readers = start(&daemon, 3, vec![mount("data", VolumeMode::Ro)])
        .await
        .unwrap();
    for reader in &readers {
        assert_eq!(reader.read("/data/note").await.unwrap(), "first");
    }
    let next = one(&daemon, "data", VolumeMode::Rw).await;
    assert_eq!(next.read("/data/note").await.unwrap(), "first");
    let shown = next.info().await.unwrap();
    assert_eq!(shown.volumes, [mount("data", VolumeMode::Rw)]);
    delete(&daemon, next).await;
    // Nothing was written, so nothing has changed.
    assert_eq!(client.volume("data").await.unwrap().generation, 2);
    client.delete_volume("data").await.unwrap();
    assert_eq!(readers[0].read("/data/note").await.unwrap(), "first");
    assert_eq!(
        code(client.volume("data").await),
        Some(ErrorCode::VolumeNotFound)
    );
    daemon.ends_clean().await;
}

#[tokio::test]
async fn forks_and_branches_have_a_clone_of_their_own() {
    let daemon = daemon().await;
    create(&daemon, "data").await;
    let source = one(&daemon, "data", VolumeMode::Rw).await;
    source.write("/data/a", "before").await.unwrap();
    let forks = source.fork(2).await.unwrap();
    source.branch("cut", BranchMode::Diff).await.unwrap();
    source.write("/data/a", "after").await.unwrap();
    forks[0].write("/data/a", "fork").await.unwrap();
    let child = daemon.child("cut").await;
    assert_eq!(child.read("/data/a").await.unwrap(), "before");
    assert_eq!(forks[1].read("/data/a").await.unwrap(), "before");
    assert_eq!(source.read("/data/a").await.unwrap(), "after");
    let shown = child.info().await.unwrap();
    assert_eq!(shown.volumes, [mount("data", VolumeMode::Clone)]);
    // A snapshot with a volume does not leave its host.
    let packed = daemon.client().pack("cut", true, None, Vec::new()).await;
    assert_eq!(code(packed.map(drop)), Some(ErrorCode::WrongState));
    delete(&daemon, source).await;
    let reader = one(&daemon, "data", VolumeMode::Ro).await;
    assert_eq!(reader.read("/data/a").await.unwrap(), "after");
    assert_eq!(child.read("/data/a").await.unwrap(), "before");
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_clone_is_committed_unless_the_volume_has_changed() {
    let daemon = daemon().await;
    let client = daemon.client();
    create(&daemon, "data").await;
    let wanted = vec![mount("data", VolumeMode::Clone)];
    let clones = start(&daemon, 2, wanted).await.unwrap();
    clones[0].write("/data/a", "zero").await.unwrap();
    clones[1].write("/data/a", "one").await.unwrap();
    let made = client.commit_volume(&clones[0].id, "data").await.unwrap();
    assert_eq!(made.generation, 2);
    let refused = client.commit_volume(&clones[1].id, "data").await;
    assert_eq!(code(refused), Some(ErrorCode::VolumeConflict));
    // The clone goes on, and a second commit of it builds on its first.
    clones[0].write("/data/b", "more").await.unwrap();
    let made = client.commit_volume(&clones[0].id, "data").await.unwrap();
    assert_eq!(made.generation, 3);
    let reader = one(&daemon, "data", VolumeMode::Ro).await;
    assert_eq!(reader.read("/data/a").await.unwrap(), "zero");
    assert_eq!(reader.read("/data/b").await.unwrap(), "more");
    assert_eq!(daemon.tags().await, [TAG]);
    let writer = one(&daemon, "data", VolumeMode::Rw).await;
    let refused = client.commit_volume(&clones[0].id, "data").await;
    assert_eq!(code(refused), Some(ErrorCode::VolumeInUse));
    delete(&daemon, writer).await;
    client.delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn what_was_written_survives_the_vmm_and_the_daemon() {
    let mut daemon = daemon().await;
    create(&daemon, "data").await;
    let writer = one(&daemon, "data", VolumeMode::Rw).await;
    writer.write("/data/a", "before the daemon").await.unwrap();
    daemon.kill().await;
    daemon.launch().await;
    let writer = Sandbox::new(daemon.client(), &writer.id);
    assert_eq!(writer.read("/data/a").await.unwrap(), "before the daemon");
    let info = daemon.client().volume("data").await.unwrap();
    assert_eq!(info.writer.as_deref(), Some(writer.id.as_str()));
    writer.write("/data/b", "before the VMM").await.unwrap();
    let pid = writer.info().await.unwrap().pid.unwrap();
    Daemon::kill_process(pid);
    freed(&daemon).await;
    let failed = writer.info().await.unwrap();
    assert_eq!(failed.state, SandboxState::Failed);
    let next = one(&daemon, "data", VolumeMode::Rw).await;
    assert_eq!(next.read("/data/a").await.unwrap(), "before the daemon");
    assert_eq!(next.read("/data/b").await.unwrap(), "before the VMM");
    // Both at once.
    next.write("/data/c", "before both").await.unwrap();
    let pid = next.info().await.unwrap().pid.unwrap();
    daemon.kill().await;
    Daemon::kill_process(pid);
    daemon.launch().await;
    freed(&daemon).await;
    let last = one(&daemon, "data", VolumeMode::Rw).await;
    assert_eq!(last.read("/data/c").await.unwrap(), "before both");
    delete(&daemon, last).await;
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_roll_back_takes_the_volume_back() {
    let daemon = daemon().await;
    let client = daemon.client();
    create(&daemon, "data").await;
    let writer = one(&daemon, "data", VolumeMode::Rw).await;
    writer.write("/data/a", "kept").await.unwrap();
    keep(&daemon, &writer, "point").await.unwrap();
    writer.write("/data/a", "dropped").await.unwrap();
    // A writer may commit whatever it has, also after a roll-back.
    client.commit_volume(&writer.id, "data").await.unwrap();
    go_back(&daemon, &writer, "point").await.unwrap();
    assert_eq!(writer.read("/data/a").await.unwrap(), "kept");
    let again = client.commit_volume(&writer.id, "data").await.unwrap();
    assert_eq!(again.generation, 3);
    go_back(&daemon, &writer, "point").await.unwrap();
    writer.write("/data/b", "after").await.unwrap();
    delete(&daemon, writer).await;
    let clone = one(&daemon, "data", VolumeMode::Clone).await;
    assert_eq!(clone.read("/data/a").await.unwrap(), "kept");
    assert_eq!(clone.read("/data/b").await.unwrap(), "after");
    // A clone that went back before its own commit does not undo the commit unnoticed.
    keep(&daemon, &clone, "point").await.unwrap();
    clone.write("/data/a", "committed").await.unwrap();
    client.commit_volume(&clone.id, "data").await.unwrap();
    go_back(&daemon, &clone, "point").await.unwrap();
    let refused = client.commit_volume(&clone.id, "data").await;
    assert_eq!(code(refused), Some(ErrorCode::VolumeConflict));
    delete(&daemon, clone).await;
    client.delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_clone_is_not_committed_to_a_new_volume_of_the_same_name() {
    let daemon = daemon().await;
    let client = daemon.client();
    create(&daemon, "data").await;
    let clone = one(&daemon, "data", VolumeMode::Clone).await;
    clone.write("/data/a", "old").await.unwrap();
    client.delete_volume("data").await.unwrap();
    let gone = client.commit_volume(&clone.id, "data").await;
    assert_eq!(code(gone), Some(ErrorCode::VolumeNotFound));
    create(&daemon, "data").await;
    let refused = client.commit_volume(&clone.id, "data").await;
    assert_eq!(code(refused), Some(ErrorCode::VolumeConflict));
    let info = client.volume("data").await.unwrap();
    assert_eq!((info.generation, info.layers), (1, 0));
    client.delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn many_writers_after_one_another_leave_few_layers() {
    let daemon = daemon().await;
    create(&daemon, "data").await;
    for number in 0..13 {
        let writer = one(&daemon, "data", VolumeMode::Rw).await;
        let path = format!("/data/{number}");
        writer.write(&path, "here").await.unwrap();
        delete(&daemon, writer).await;
    }
    let info = daemon.client().volume("data").await.unwrap();
    assert_eq!((info.layers, info.generation), (13, 14));
    // The next use merges once for all children, and the volume keeps the merged layer.
    let readers = start(&daemon, 3, vec![mount("data", VolumeMode::Ro)])
        .await
        .unwrap();
    let merged = daemon.client().volume("data").await.unwrap();
    assert_eq!((merged.layers, merged.generation), (1, info.generation));
    drop(readers);
    let reader = one(&daemon, "data", VolumeMode::Ro).await;
    for number in 0..13 {
        assert_eq!(
            reader.read(&format!("/data/{number}")).await.unwrap(),
            "here"
        );
    }
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn wishes_that_cannot_be_fulfilled_are_refused_before_anything_starts() {
    let daemon = daemon().await;
    create(&daemon, "data").await;
    create(&daemon, "more").await;
    let rw = |name: &str| mount(name, VolumeMode::Rw);
    let at = |path: &str| VolumeMount {
        path: path.to_owned(),
        ..rw("data")
    };
    let invalid = Some(ErrorCode::InvalidRequest);
    for path in ["data", "/", "/a/../b", "", "//"] {
        assert_eq!(
            code(start(&daemon, 1, vec![at(path)]).await),
            invalid,
            "{path}"
        );
    }
    assert_eq!(code(start(&daemon, 2, vec![rw("data")]).await), invalid);
    assert_eq!(
        code(start(&daemon, 1, vec![rw("data"), rw("more")]).await),
        invalid
    );
    let clone = |path: &str| VolumeMount {
        path: path.to_owned(),
        ..mount("data", VolumeMode::Clone)
    };
    let four = ["/a", "/b", "/c", "/d"].map(clone).to_vec();
    assert_eq!(code(start(&daemon, 1, four).await), invalid);
    let none = start(&daemon, 1, vec![rw("none")]).await;
    assert_eq!(code(none), Some(ErrorCode::VolumeNotFound));
    let again = CreateVolume {
        name: "data".into(),
        size_mib: SMALL,
    };
    let again = daemon.client().create_volume(&again).await;
    assert_eq!(code(again), Some(ErrorCode::AlreadyExists));
    for size_mib in [0, 7, 1 << 21] {
        let request = CreateVolume {
            name: "x".into(),
            size_mib,
        };
        assert_eq!(code(daemon.client().create_volume(&request).await), invalid);
    }
    // A branch of a sandbox with three volumes has no room for another.
    let three = ["/a", "/b", "/c"].map(clone).to_vec();
    let full = start(&daemon, 1, three).await.unwrap().pop().unwrap();
    full.branch("full", BranchMode::Diff).await.unwrap();
    let request = CreateSandboxes {
        snapshot_tag: "full".into(),
        volumes: vec![clone("/d")],
        ..CreateSandboxes::default()
    };
    let refused = daemon.client().spawn(&request).await;
    assert_eq!(code(refused), Some(ErrorCode::Unsupported));
    let request = CreateSandboxes {
        volumes: vec![clone("/a")],
        ..request
    };
    assert_eq!(code(daemon.client().spawn(&request).await), invalid);
    assert!(
        daemon
            .client()
            .volume("data")
            .await
            .unwrap()
            .writer
            .is_none()
    );
    assert_eq!(daemon.sandboxes().await.len(), 1);
}

#[tokio::test]
async fn a_snapshot_has_copies_of_its_volumes() {
    let daemon = daemon().await;
    create(&daemon, "data").await;
    let writer = one(&daemon, "data", VolumeMode::Rw).await;
    writer.write("/data/a", "seed").await.unwrap();
    let written = daemon.parent_with("with", vec![mount("data", VolumeMode::Rw)]);
    assert_eq!(code(written.await), Some(ErrorCode::InvalidRequest));
    delete(&daemon, writer).await;
    let copies = vec![mount("data", VolumeMode::Clone)];
    daemon.parent_with("with", copies).await.unwrap();
    let children = daemon.spawn("with", 2).await.unwrap();
    children[0].write("/data/a", "mine").await.unwrap();
    assert_eq!(children[1].read("/data/a").await.unwrap(), "seed");
    // A child may have more volumes, and may commit its copy.
    let made = daemon.client().commit_volume(&children[0].id, "data");
    assert_eq!(made.await.unwrap().generation, 3);
    daemon.client().delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn an_ext4_image_becomes_a_volume() {
    let daemon = daemon().await;
    let client = daemon.client();
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    let made = std::process::Command::new("/usr/sbin/mke2fs")
        .args(["-q", "-t", "ext4"])
        .arg(&image)
        .arg("16M")
        .status();
    assert!(made.unwrap().success());
    let bytes = std::fs::read(image).unwrap();
    let pieces = |bytes: &[u8]| {
        let pieces = bytes.chunks(1 << 20).map(|piece| Ok(piece.to_vec()));
        futures::stream::iter(pieces.collect::<Vec<_>>())
    };
    let invalid = Some(ErrorCode::InvalidRequest);
    let zeroes = vec![0; 16 << 20];
    for bad in [&zeroes[..], &bytes[..1 << 20], &bytes[..(9 << 20) + 7]] {
        assert_eq!(
            code(client.import_volume("data", pieces(bad)).await),
            invalid
        );
    }
    let made = client.import_volume("data", pieces(&bytes)).await.unwrap();
    assert_eq!((made.size_mib, made.clean), (16, true));
    let again = client.import_volume("data", pieces(&bytes)).await;
    assert_eq!(code(again), Some(ErrorCode::AlreadyExists));
    let writer = one(&daemon, "data", VolumeMode::Rw).await;
    delete(&daemon, writer).await;
    client.delete_volume("data").await.unwrap();
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_volume_of_another_owner_does_not_exist() {
    let options = Options {
        tokens: vec!["one".into()],
        ..Options::default()
    };
    let daemon = Daemon::with(programs!(), options).await;
    create(&daemon, "mine").await;
    let other = daemon.user("other").await;
    assert!(other.volumes().await.unwrap().is_empty());
    assert_eq!(
        code(other.volume("mine").await),
        Some(ErrorCode::VolumeNotFound)
    );
    assert_eq!(
        code(other.delete_volume("mine").await),
        Some(ErrorCode::VolumeNotFound)
    );
    assert_eq!(daemon.client().volumes().await.unwrap().len(), 1);
}
