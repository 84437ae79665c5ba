//! Waits for the disk, counted in the daemon by `strace`.
//!
//! The daemon copies the log of its database into the database file while it is idle. Each copy syncs both files, and no
//! request waits for it, so copies are left out.

use std::path::PathBuf;
use std::process::Stdio;

use forkd_api::BranchMode;
use forkd_daemon_tests::{Daemon, until};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

use crate::{TAG, daemon};

/// Calls that wait until data is on disk.
const SYNCS: &str = "fsync,fdatasync,sync,syncfs,sync_file_range";
/// The database file, as `strace` prints the path of a descriptor.
const DATABASE: &str = "/state.db>";
/// Rounds of each operation: a sync of every round stands out.
const ROUNDS: usize = 4;

/// A running `strace` of the daemon.
struct Trace {
    strace: Child,
    out: PathBuf,
}

impl Trace {
    async fn attach(daemon: &Daemon) -> Self {
        let pid = daemon.pid().to_string();
        let out = daemon.data().join("syncs");
        let strace = Command::new("strace")
            .args(["-f", "-qq", "-y", "-e", &format!("trace={SYNCS}"), "-o"])
            .arg(&out)
            .args(["-p", &pid])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("strace starts; make setup installs it");
        until("strace is attached to every thread", async || {
            let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
            let traced = |path: PathBuf| {
                let status = std::fs::read_to_string(path.join("status")).unwrap_or_default();
                !status.contains("TracerPid:\t0\n")
            };
            threads
                .filter_map(Result::ok)
                .all(|thread| traced(thread.path()))
                .then_some(())
        })
        .await;
        Self { strace, out }
    }

    /// Detaches. Returns the calls that requests have made, a line each.
    async fn finish(mut self) -> Vec<String> {
        let pid = self.strace.id().and_then(|id| Pid::from_raw(id as i32));
        kill_process(pid.expect("strace runs"), Signal::INT).expect("a signal is sent");
        self.strace.wait().await.expect("strace ends");
        let text = std::fs::read_to_string(&self.out).expect("strace wrote its report");
        // A call that is resumed was counted when it began.
        let mut calls: Vec<String> = text
            .lines()
            .filter(|line| !line.contains(" resumed>"))
            .map(str::to_owned)
            .collect();
        let copies = calls.iter().filter(|call| call.contains(DATABASE)).count();
        calls.retain(|call| !call.contains(DATABASE));
        for _ in 0..copies {
            let log = calls
                .iter()
                .position(|call| call.contains("/state.db-wal>"));
            calls.remove(log.expect("a copy of the log syncs the log first"));
        }
        calls
    }
}

#[tokio::test]
async fn children_and_live_forks_wait_for_no_disk() {
    let daemon = daemon().await;
    let trace = Trace::attach(&daemon).await;
    let source = daemon.child(TAG).await;
    for _ in 0..ROUNDS {
        daemon.child(TAG).await;
        assert_eq!(source.fork(1).await.unwrap().len(), 1);
    }
    let calls = trace.finish().await;
    assert!(calls.is_empty(), "{calls:#?}");
    daemon.ends_clean().await;
}

#[tokio::test]
async fn a_branch_waits_for_the_disk_three_times() {
    let daemon = daemon().await;
    let source = daemon.child(TAG).await;
    let trace = Trace::attach(&daemon).await;
    for round in 0..ROUNDS {
        source.write("/round", &round.to_string()).await.unwrap();
        let tag = format!("round{round}");
        source.branch(&tag, BranchMode::Diff).await.unwrap();
    }
    let calls = trace.finish().await;
    assert!(
        !calls.is_empty(),
        "a branch that syncs nothing is not durable"
    );
    assert!(calls.len() <= 3 * ROUNDS, "{calls:#?}");
    daemon.ends_clean().await;
}
