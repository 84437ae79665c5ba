//! Processes that outlive the agent of a test.
//!
//! The agent of a test is an ordinary process, so its end does not end the commands that it started. The test process
//! therefore adopts orphans, and [`end_all`] kills them when the last agent of the process is gone.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid,
};

/// How long killed processes may take to go.
const PATIENCE: Duration = Duration::from_secs(60);

/// Makes this process the parent of every orphan below it.
pub fn adopt() {
    set_child_subreaper(Some(getpid())).unwrap();
}

/// Kills every process below this one, and returns when all are gone.
pub fn end_all() {
    let begin = Instant::now();
    loop {
        let below = below_this();
        if below.is_empty() {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{below:?} do not end");
        for pid in below {
            let _ = kill_process(pid, Signal::KILL);
            // Only the children of this process can be waited for; the others become its children.
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The processes below this one.
pub fn below_this() -> Vec<Pid> {
    let parents: HashMap<Pid, Pid> = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Pid::from_raw)
        .filter_map(|pid| Some((pid, parent_of(pid)?)))
        .collect();
    let is_below = |pid: &Pid| {
        std::iter::successors(parents.get(pid), |pid| parents.get(pid)).any(|up| *up == getpid())
    };
    parents.keys().copied().filter(is_below).collect()
}

fn parent_of(pid: Pid) -> Option<Pid> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in the second field may hold anything, so fields are counted after it.
    let (_, rest) = stat.rsplit_once(')')?;
    Pid::from_raw(rest.split_whitespace().nth(1)?.parse().ok()?)
}
