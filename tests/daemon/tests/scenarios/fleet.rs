//! Three daemons behind one gateway.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use forkd_api::{
    CreateSandboxes, CreateVolume, ErrorCode, SandboxInfo, SandboxState, UpdateNode, VolumeMode,
    VolumeMount,
};
use forkd_daemon_tests::{Daemon, Options, Sandbox, programs, until};
use forkd_rest_client::{Client, Error, Target};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::TAG;

/// A gateway and the daemons behind it.
struct Fleet {
    nodes: Vec<Daemon>,
    client: Client,
    _home: TempDir,
    _gateway: Child,
}

/// Starts daemons with a parent each, and a gateway.
async fn fleet(count: usize, args: &[&str]) -> Fleet {
    let mut nodes = Vec::new();
    for index in 0..count {
        let name = format!("node{index}");
        let mut all = vec!["--node", name.as_str()];
        all.extend_from_slice(args);
        let daemon = Daemon::with(programs!(), Options::args(&all)).await;
        daemon.parent(TAG).await.expect("a parent is built");
        nodes.push(daemon);
    }
    let home = tempfile::Builder::new()
        .prefix("forkd-")
        .tempdir()
        .expect("a directory");
    let socket = home.path().join("gateway.sock");
    let gateway = gateway(&nodes, &socket);
    let client = Client::new(&Target::Unix(socket), None).expect("a client");
    until("the gateway answers", async || {
        client.health().await.is_ok().then_some(())
    })
    .await;
    Fleet {
        nodes,
        client,
        _home: home,
        _gateway: gateway,
    }
}

fn gateway(nodes: &[Daemon], socket: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gateway-under-test"));
    command
        .arg("--listen")
        .arg(format!("unix://{}", socket.display()));
    for node in nodes {
        command
            .arg("--node")
            .arg(node.client().target().to_string());
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("the gateway starts")
}

impl Fleet {
    async fn spawn(&self, n: u32) -> Result<Vec<SandboxInfo>, Error> {
        let request = CreateSandboxes {
            snapshot_tag: TAG.to_owned(),
            n,
            ..CreateSandboxes::default()
        };
        self.client.spawn(&request).await
    }

    async fn drain(&self, name: &str, draining: bool) {
        let request = UpdateNode {
            draining: Some(draining),
        };
        let node = self.client.update_node_of(name, &request).await.unwrap();
        assert_eq!(node.draining, draining);
    }

    async fn ends_clean(&self) {
        for node in &self.nodes {
            node.ends_clean().await;
        }
    }
}

/// The names of the nodes that have these sandboxes.
fn nodes_of(sandboxes: &[SandboxInfo]) -> BTreeSet<String> {
    let node = |info: &SandboxInfo| {
        let id: forkd_types::SandboxId = info.id.parse().unwrap();
        id.node().expect("the ID names a node").to_string()
    };
    sandboxes.iter().map(node).collect()
}

fn code<T: std::fmt::Debug>(result: Result<T, Error>) -> ErrorCode {
    match result.unwrap_err() {
        Error::Refused { body, .. } => body.code,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_burst_is_split_and_every_child_is_reached_by_its_id() {
    let fleet = fleet(3, &["--max-sandboxes", "40"]).await;
    let children = fleet.spawn(30).await.unwrap();
    assert_eq!(children.len(), 30);
    assert!(
        children
            .iter()
            .all(|child| child.state == SandboxState::Running)
    );
    assert_eq!(nodes_of(&children).len(), 3, "all nodes take part");
    for child in children.iter().step_by(7) {
        let sandbox = Sandbox::new(&fleet.client, &child.id);
        sandbox.write("/own", &child.id).await.unwrap();
        assert_eq!(sandbox.read("/own").await.unwrap(), child.id);
        assert_eq!(sandbox.read("/mark").await.unwrap(), "parent\n");
        let forked = sandbox.fork(1).await.unwrap();
        assert_eq!(forked[0].read("/own").await.unwrap(), child.id);
        fleet.client.kill(&forked[0].id).await.unwrap();
    }
    let listed = fleet.client.sandboxes().await.unwrap();
    assert_eq!(listed.len(), 30);
    let tags = fleet.client.snapshots().await.unwrap();
    assert_eq!(tags.len(), 1, "a snapshot on three nodes is one");
    for child in &children {
        fleet.client.kill(&child.id).await.unwrap();
    }
    assert!(fleet.client.sandboxes().await.unwrap().is_empty());
    fleet.ends_clean().await;
}

#[tokio::test]
async fn a_node_that_drains_takes_nothing_new_and_keeps_what_it_has() {
    let fleet = fleet(2, &[]).await;
    let before = fleet.spawn(8).await.unwrap();
    assert_eq!(nodes_of(&before).len(), 2);
    fleet.drain("node0", true).await;
    let during = fleet.spawn(4).await.unwrap();
    assert_eq!(nodes_of(&during), BTreeSet::from(["node1".to_owned()]));
    for child in &before {
        let sandbox = Sandbox::new(&fleet.client, &child.id);
        assert_eq!(sandbox.read("/mark").await.unwrap(), "parent\n");
    }
    fleet.drain("node1", true).await;
    assert_eq!(code(fleet.spawn(1).await), ErrorCode::ShuttingDown);
    fleet.drain("node0", false).await;
    until("the gateway sees the end of the drain", async || {
        fleet.spawn(1).await.ok()
    })
    .await;
    fleet.ends_clean().await;
}

#[tokio::test]
async fn a_full_node_passes_its_share_to_the_next() {
    let fleet = fleet(2, &["--max-sandboxes", "5"]).await;
    // The view of the gateway may say that there is room where there is none.
    let mut made = fleet.spawn(5).await.unwrap();
    made.extend(fleet.spawn(2).await.unwrap());
    made.extend(fleet.spawn(1).await.unwrap());
    assert_eq!(made.len(), 8);
    // All or none: two are free.
    assert_eq!(code(fleet.spawn(5).await), ErrorCode::LimitReached);
    let left = fleet.client.sandboxes().await.unwrap().len();
    assert_eq!(left, 8, "nothing stays of a burst that was refused");
    fleet.ends_clean().await;
}

#[tokio::test]
async fn a_node_that_is_killed_is_named_and_comes_back_with_its_sandboxes() {
    let mut fleet = fleet(2, &[]).await;
    let children = fleet.spawn(6).await.unwrap();
    let of = |node: &str| {
        let found = children.iter().find(|child| child.id.contains(node));
        found.expect("a child on each node").id.clone()
    };
    let (lost, kept) = (of("node0"), of("node1"));
    fleet.nodes[0].kill().await;
    assert_eq!(
        code(Sandbox::new(&fleet.client, &lost).run(&["true"]).await),
        ErrorCode::NodeLost
    );
    let alive = Sandbox::new(&fleet.client, &kept);
    assert_eq!(alive.read("/mark").await.unwrap(), "parent\n");
    let during = fleet.spawn(2).await.unwrap();
    assert_eq!(nodes_of(&during), BTreeSet::from(["node1".to_owned()]));
    let listed = fleet.client.nodes().await.unwrap();
    let states: Vec<bool> = listed.iter().map(|node| node.reachable).collect();
    assert_eq!(states.iter().filter(|reachable| **reachable).count(), 1);
    fleet.nodes[0].launch().await;
    until("the sandbox is back", async || {
        let sandbox = Sandbox::new(&fleet.client, &lost);
        sandbox.read("/mark").await.ok()
    })
    .await;
    let unknown = "sbzzzzz6917a1b20f3c9a51d2e4b687";
    assert_eq!(
        code(fleet.client.exec(unknown, &Default::default()).await),
        ErrorCode::NodeNotFound
    );
    fleet.ends_clean().await;
}

#[tokio::test]
async fn streams_and_events_of_all_nodes_arrive() {
    let fleet = fleet(2, &[]).await;
    let mut events = fleet.client.events().await.unwrap();
    let children = fleet.spawn(6).await.unwrap();
    let mut ready = BTreeSet::new();
    let wanted: BTreeSet<String> = children.iter().map(|child| child.id.clone()).collect();
    let reading = async {
        while ready != wanted {
            let event = events.next().await.expect("the stream goes on").unwrap();
            if wanted.contains(&event.object) {
                ready.insert(event.object);
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), reading)
        .await
        .expect("events of both nodes arrive");
    fleet.ends_clean().await;
}

/// A volume belongs to one node, so children with it start there.
#[tokio::test]
async fn children_with_a_volume_start_on_its_node() {
    let fleet = fleet(3, &[]).await;
    let request = CreateVolume {
        name: "data".into(),
        size_mib: 16,
    };
    fleet.nodes[2]
        .client()
        .create_volume(&request)
        .await
        .unwrap();
    let mut request = CreateSandboxes {
        snapshot_tag: TAG.to_owned(),
        n: 2,
        volumes: vec![VolumeMount {
            name: "data".into(),
            path: "/data".into(),
            mode: VolumeMode::Clone,
        }],
        ..CreateSandboxes::default()
    };
    let children = fleet.client.spawn(&request).await.unwrap();
    assert_eq!(children.len(), 2);
    assert_eq!(fleet.nodes[2].sandboxes().await.len(), 2);
    request.volumes[0].name = "none".into();
    let refused = fleet.client.spawn(&request).await.unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::VolumeNotFound));
}
