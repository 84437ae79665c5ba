//! Many clients at once.

use forkd_api::BranchMode;
use forkd_daemon_tests::{Daemon, Options, Sandbox};

use crate::checkpoint::{go_back, keep};
use crate::{TAG, daemon_with};

const CLIENTS: usize = 20;

/// A life with everything in it.
async fn lives(daemon: &Daemon, name: usize) {
    let text = format!("client {name}");
    let sandbox = daemon.child(TAG).await;
    sandbox.write("/who", &text).await.unwrap();
    let tag = format!("client{name}");
    sandbox.branch(&tag, BranchMode::Live).await.unwrap();
    keep(daemon, &sandbox, "point").await.unwrap();
    sandbox.write("/who", "another child").await.unwrap();
    go_back(daemon, &sandbox, "point").await.unwrap();
    let children: Vec<Sandbox> = sandbox.fork(2).await.unwrap();
    daemon.client().kill(&sandbox.id).await.unwrap();
    for child in &children {
        assert_eq!(child.read("/who").await.unwrap(), text);
        assert_eq!(child.run(&["cat", "/who"]).await.unwrap().stdout, text);
        daemon.client().kill(&child.id).await.unwrap();
    }
    let again = daemon.child(&tag).await;
    assert_eq!(again.read("/who").await.unwrap(), text);
    daemon.client().kill(&again.id).await.unwrap();
    daemon
        .client()
        .delete_snapshot(&tag, false, true)
        .await
        .unwrap();
}

#[tokio::test]
async fn twenty_clients_do_not_disturb_each_other() {
    let daemon = daemon_with(Options::args(&["--branch-concurrency", "20"])).await;
    futures::future::join_all((0..CLIENTS).map(|name| lives(&daemon, name))).await;
    assert!(daemon.sandboxes().await.is_empty());
    daemon.ends_clean().await;
}
