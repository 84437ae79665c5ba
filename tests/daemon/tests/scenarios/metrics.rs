//! The metrics of the daemon.

use forkd_daemon_tests::until;

use crate::{TAG, daemon};

const READS: &str = "forkd_vmm_device{device=\"disk\",counter=\"reads\"} ";

/// The value of a series.
fn value(text: &str, series: &str) -> Option<f64> {
    text.lines()
        .find_map(|line| line.strip_prefix(series)?.parse().ok())
}

#[tokio::test]
async fn the_counts_of_vms_that_have_ended_go_with_them() {
    let daemon = daemon().await;
    let first = daemon.child(TAG).await;
    let second = daemon.child(TAG).await;
    for (sandbox, left) in [(None, 6.0), (Some(first), 3.0), (Some(second), 0.0)] {
        if let Some(sandbox) = sandbox {
            daemon.client().kill(&sandbox.id).await.unwrap();
        }
        let text = daemon.client().metrics().await.unwrap();
        assert_eq!(value(&text, READS), Some(left), "{text}");
    }
    daemon.ends_clean().await;
}

#[tokio::test]
async fn the_daemon_folds_the_samples_of_histograms_by_itself() {
    let daemon = daemon().await;
    let folds = async || {
        let text = daemon.client().metrics().await.unwrap();
        value(&text, "forkd_metrics_folds_total ")
    };
    let first = until("samples are folded", folds).await;
    until("samples are folded again", async || {
        (folds().await? > first).then_some(())
    })
    .await;
}
