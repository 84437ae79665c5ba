//! Nothing stays behind, however often sandboxes come and go. Fake VMMs outlive `forkd-spawn`, so its death is tested with
//! real ones.

use forkd_api::SandboxState;
use forkd_daemon_tests::{Daemon, Options, programs, until};

use crate::{TAG, daemon};

/// Ten at a time, so a hundred sandboxes.
const ROUNDS: usize = 10;
const EACH: u32 = 10;

#[tokio::test]
async fn a_hundred_sandboxes_come_and_go() {
    let daemon = daemon().await;
    daemon.child(TAG).await;
    let quiet = daemon.open_files();
    for _ in 0..ROUNDS {
        for child in daemon.spawn(TAG, EACH).await.unwrap() {
            daemon.client().kill(&child.id).await.unwrap();
        }
    }
    until("the descriptors are closed", async || {
        (daemon.open_files() <= quiet + 4).then_some(())
    })
    .await;
    assert_eq!(daemon.sandboxes().await.len(), 1);
    assert_eq!(daemon.leftovers().vmms.len(), 1);
    daemon.ends_clean().await;
}

/// The daemon may be told to stop before the network engine has started.
#[tokio::test]
async fn a_daemon_that_stops_at_once_leaves_no_program() {
    let mut daemon = Daemon::prepare(&programs!(), Options::default());
    for _ in 0..5 {
        daemon.launch().await;
        daemon.stop().await;
        assert_eq!(daemon.helpers(), Vec::<u32>::new(), "{}", daemon.log_tail());
    }
}

#[tokio::test]
async fn a_vmm_that_is_killed_takes_only_its_sandbox_along() {
    let daemon = daemon().await;
    let children = daemon.spawn(TAG, 3).await.unwrap();
    let victim = daemon.sandboxes().await[0].clone();
    Daemon::kill_process(victim.pid.unwrap());
    until("the sandbox has failed", async || {
        let all = daemon.sandboxes().await;
        let failed = |one: &&forkd_api::SandboxInfo| one.state == SandboxState::Failed;
        (all.iter().filter(failed).count() == 1).then_some(())
    })
    .await;
    for child in children.iter().filter(|child| child.id != victim.id) {
        assert_eq!(child.read("/mark").await.unwrap(), "parent\n");
    }
    daemon.ends_clean().await;
}
