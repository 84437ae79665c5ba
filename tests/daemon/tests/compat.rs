//! The data directory of an earlier version, opened by this tree: it works, or it is refused with what to do.

use std::path::Path;
use std::process::Command;

use forkd_api::{
    CreateSandboxes, CreateVolume, ErrorCode, SandboxState, VolumeMode, VolumeMount,
    WorkspaceStatus,
};
use forkd_daemon_tests::{Daemon, Options, Sandbox, programs};

/// A tag of the archive, a file in its guest, and the content of that file.
const SNAPSHOTS: [(&str, &str, &str); 4] = [
    ("parent", "/mark", "parent\n"),
    ("full", "/state", "full"),
    ("diff", "/state", "diff"),
    ("live", "/state", "live"),
];

/// The files of an earlier version, with a daemon that is not started.
fn unpack(archive: &str) -> Daemon {
    let daemon = Daemon::prepare(&programs!(), Options::default());
    let archive = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(archive);
    let unpacked = Command::new("tar")
        .args(["--extract", "--gzip", "--sparse", "--no-same-owner"])
        .arg("--file")
        .arg(archive)
        .arg("--directory")
        .arg(daemon.data())
        .status();
    assert!(unpacked.expect("tar runs").success());
    daemon
}

/// The daemon starts; false if it refuses its files and says what to do.
async fn starts(daemon: &mut Daemon) -> bool {
    if daemon.try_launch().await.is_ok() {
        return true;
    }
    let log = daemon.log_tail();
    let message = log.split_once("error: ").map(|(_, message)| message);
    let message = message.unwrap_or_else(|| panic!("no reason is given:\n{log}"));
    let data = daemon.data().to_string_lossy().into_owned();
    assert!(message.contains(&data), "no place is named: {message}");
    assert!(
        message.contains("--data-dir"),
        "no way out is named: {message}"
    );
    false
}

/// The store is refused as a whole: its format is an earlier one.
#[tokio::test]
async fn commit_65cd0aa() {
    let mut daemon = unpack("65cd0aa.tar.gz");
    assert!(!starts(&mut daemon).await);
}

/// Snapshots, sandboxes and workspaces work.
#[tokio::test]
async fn commit_380817d() {
    let mut daemon = unpack("380817d.tar.gz");
    assert!(starts(&mut daemon).await);
    for (tag, path, content) in SNAPSHOTS {
        let child = daemon.child(tag).await;
        assert_eq!(child.read(path).await.unwrap(), content, "{tag}");
    }
    no_room_for_volumes(&daemon).await;
    let listed = daemon.sandboxes().await;
    let gone = listed
        .iter()
        .find(|info| info.labels.contains_key("kind"))
        .expect("the sandbox is not forgotten");
    assert_eq!(gone.state, SandboxState::Failed);
    assert!(gone.error.is_some());
    let client = daemon.client();
    let workspaces = client.workspaces().await.unwrap();
    assert_eq!(workspaces[0].name, "workspace");
    assert_eq!(workspaces[0].status, WorkspaceStatus::Suspended);
    let resumed = client.resume_workspace("workspace").await.unwrap();
    let sandbox = Sandbox::new(client, &resumed.live_sandbox_id.unwrap());
    assert_eq!(sandbox.read("/state").await.unwrap(), "workspace");
    client.delete_workspace("workspace").await.unwrap();
    daemon.ends_clean().await;
}

/// Machines of that version have no device that a volume could be attached to.
async fn no_room_for_volumes(daemon: &Daemon) {
    let volume = CreateVolume {
        name: "data".into(),
        size_mib: 16,
    };
    daemon.client().create_volume(&volume).await.unwrap();
    let request = CreateSandboxes {
        snapshot_tag: SNAPSHOTS[0].0.into(),
        volumes: vec![VolumeMount {
            name: volume.name,
            path: "/data".into(),
            mode: VolumeMode::Rw,
        }],
        ..CreateSandboxes::default()
    };
    let refused = daemon.client().spawn(&request).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::Unsupported));
    assert!(refused.hint().is_some_and(|hint| hint.contains("freeze")));
    daemon.client().delete_volume("data").await.unwrap();
}

#[tokio::test]
async fn a_store_of_a_later_version_is_refused() {
    let mut daemon = unpack("65cd0aa.tar.gz");
    std::fs::write(daemon.data().join("store.json"), r#"{"format":99}"#).unwrap();
    assert!(!starts(&mut daemon).await);
}

#[tokio::test]
async fn a_snapshot_of_another_version_is_refused_alone() {
    let mut daemon = unpack("65cd0aa.tar.gz");
    // The store as a whole is of this version.
    std::fs::write(daemon.data().join("store.json"), r#"{"format":2}"#).unwrap();
    let manifest = daemon.data().join("snapshots/full/manifest.json");
    std::fs::write(manifest, r#"{"schema":99}"#).unwrap();
    assert!(starts(&mut daemon).await);
    let error = daemon.spawn("full", 1).await.unwrap_err();
    assert!(error.code().is_some(), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("forkd rmi")));
    daemon
        .client()
        .delete_snapshot("full", false, true)
        .await
        .unwrap();
    assert!(!daemon.tags().await.contains(&"full".to_owned()));
}
