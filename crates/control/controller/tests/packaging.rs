//! Units, dashboards and scripts of the packages fit the programs.

use std::collections::BTreeSet;

const DASHBOARD: &str = include_str!("../../../../packaging/grafana/forkd.json");
const METRICS: &str = concat!(
    include_str!("../../edge/src/metrics.rs"),
    include_str!("../../sandboxes/src/metrics.rs")
);
const SOCKET: &str = include_str!("../../../../packaging/systemd/forkd.socket");
const UNIT: &str = include_str!("../../../../packaging/systemd/forkd-controller.service");

/// The metrics that a text names, without what a histogram puts behind its name.
fn names(text: &str) -> BTreeSet<String> {
    text.lines()
        // Crates have such names, too.
        .filter(|line| !line.starts_with("use "))
        .flat_map(|line| line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')))
        .filter(|word| word.starts_with("forkd_"))
        .map(|word| {
            let bare = word
                .strip_suffix("_bucket")
                .or_else(|| word.strip_suffix("_count"))
                .or_else(|| word.strip_suffix("_sum"));
            bare.unwrap_or(word).to_owned()
        })
        .collect()
}

#[test]
fn the_dashboard_and_the_daemon_name_the_same_metrics() {
    serde_json::from_str::<serde_json::Value>(DASHBOARD).unwrap();
    assert_eq!(names(DASHBOARD), names(METRICS));
}

#[test]
fn the_sockets_go_to_the_daemon() {
    assert!(SOCKET.contains("\nService=forkd-controller.service\n"));
    assert!(UNIT.contains("\nRequires=forkd.socket\n"));
}

#[test]
fn the_unit_waits_longer_than_the_daemon_drains() {
    assert!(UNIT.contains("TimeoutStopSec=30s"));
    assert!(
        UNIT.contains("KillMode=process"),
        "sandboxes outlive the daemon"
    );
    assert!(UNIT.contains("Delegate=") && UNIT.contains("WatchdogSec="));
}
