//! Walls around sandboxes that a host does not have.

use forkd_daemon_tests::{Daemon, Options, programs};

const WALL: &str = "namespaces";
const REASON: &str = "the kernel has no user namespaces";

#[tokio::test]
async fn a_missing_wall_is_reported_with_its_reason() {
    let mut daemon = Daemon::prepare(&programs!(), Options::default());
    daemon.without_wall(WALL, REASON);
    daemon.launch().await;
    let isolation = daemon.client().status().await.unwrap().isolation;
    let missing: Vec<_> = isolation
        .missing
        .iter()
        .map(|missing| (missing.wall.as_str(), missing.reason.as_deref()))
        .collect();
    assert_eq!(missing, [(WALL, Some(REASON))]);
}

#[tokio::test]
async fn a_daemon_that_requires_every_wall_does_not_start_without_one() {
    let mut daemon = Daemon::prepare(&programs!(), Options::args(&["--require-jail"]));
    daemon.without_wall(WALL, REASON);
    let ended = daemon.try_launch().await.unwrap_err();
    assert_eq!(ended.code(), Some(1));
    let log = daemon.log_tail();
    assert!(log.contains("--require-jail"), "{log}");
    assert!(log.contains(&format!("{WALL} ({REASON})")), "{log}");
    assert_eq!(
        daemon.helpers(),
        Vec::<u32>::new(),
        "programs were left behind:\n{log}"
    );
}

#[tokio::test]
async fn a_daemon_that_requires_every_wall_starts_with_all_of_them() {
    Daemon::with(programs!(), Options::args(&["--require-jail"])).await;
}
