//! The control group of user processes, and how they are frozen.
//!
//! ```text
//!   running ──freeze──► frozen ──cut──► frozen in the source and in every child
//!      ▲                  │
//!      └──────thaw────────┘
//! ```
//!
//! Whether the group is frozen is in the agent's memory as in the kernel's, so a child finds both as the cut left them.
//! There is no timer that thaws: in a child it could end before the new identity is in force.

use std::cell::Cell;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forkd_guest_proto::{AgentError, ErrorCode, FreezeReport};

use crate::error;

/// The first and the longest time between two looks at whether the kernel is done.
const LOOK: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(10));

/// How long killed processes may take to end.
const KILL_TIME: Duration = Duration::from_secs(10);

/// The control group of user processes.
pub struct UserGroup {
    path: PathBuf,
    procs: OwnedFd,
    frozen: Cell<bool>,
}

impl UserGroup {
    /// Opens a group that exists.
    pub fn open(path: &Path) -> io::Result<Self> {
        let procs = OpenOptions::new()
            .write(true)
            .open(path.join("cgroup.procs"))?;
        Ok(Self {
            path: path.to_owned(),
            procs: procs.into(),
            frozen: Cell::new(false),
        })
    }

    /// The file through which a process joins.
    pub fn procs(&self) -> BorrowedFd<'_> {
        self.procs.as_fd()
    }

    pub fn is_frozen(&self) -> bool {
        self.frozen.get()
    }

    /// Freezes every process of the group. On an error all of them run.
    pub async fn freeze(&self, limit: Duration) -> Result<FreezeReport, AgentError> {
        let start = Instant::now();
        let was_frozen = self.frozen.replace(true);
        let mut undo = ThawOnDrop(Some(self));
        self.write_state("1")?;
        let mut pause = LOOK.0;
        while !self.kernel_says_frozen()? {
            if start.elapsed() >= limit {
                return Err(AgentError::new(
                    ErrorCode::Timeout,
                    format!(
                        "user processes were not frozen within {} ms{}",
                        limit.as_millis(),
                        self.blockers()
                    ),
                ));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK.1);
        }
        undo.0 = None;
        Ok(FreezeReport {
            was_frozen,
            took_us: u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX),
        })
    }

    /// Lets every process of the group run; returns whether they were frozen.
    pub fn thaw(&self) -> Result<bool, AgentError> {
        if self.frozen.get() {
            self.write_state("0")?;
        }
        Ok(self.frozen.replace(false))
    }

    /// Kills every process of the group and waits until none is left.
    pub async fn kill_all(&self) -> Result<(), AgentError> {
        self.thaw()?;
        let path = self.path.join("cgroup.kill");
        fs::write(&path, "1").map_err(|error| error::at("write", &path, &error))?;
        let start = Instant::now();
        let mut pause = LOOK.0;
        while self.has_event("populated 1")? {
            if start.elapsed() >= KILL_TIME {
                return Err(AgentError::new(
                    ErrorCode::Timeout,
                    format!("user processes did not end{}", self.blockers()),
                ));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOOK.1);
        }
        Ok(())
    }

    fn write_state(&self, state: &str) -> Result<(), AgentError> {
        let path = self.path.join("cgroup.freeze");
        fs::write(&path, state).map_err(|error| error::at("write", &path, &error))
    }

    fn kernel_says_frozen(&self) -> Result<bool, AgentError> {
        self.has_event("frozen 1")
    }

    fn has_event(&self, event: &str) -> Result<bool, AgentError> {
        let path = self.path.join("cgroup.events");
        let text = fs::read_to_string(&path).map_err(|error| error::at("read", &path, &error))?;
        Ok(text.lines().any(|line| line == event))
    }

    /// The processes that wait in the kernel without letting themselves be stopped, for people.
    fn blockers(&self) -> String {
        let procs = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        let waiting: Vec<_> = procs
            .lines()
            .filter(|pid| state_of(pid) == Some('D'))
            .take(8)
            .collect();
        match waiting.as_slice() {
            [] => String::new(),
            found => format!("; uninterruptible: {}", found.join(", ")),
        }
    }
}

/// The state letter of a process.
fn state_of(pid: &str) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in front may hold spaces and parentheses.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Thaws if freezing fails, also when its request is dropped.
struct ThawOnDrop<'a>(Option<&'a UserGroup>);

impl Drop for ThawOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            let _ = group.thaw();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that looks like a group whose kernel never gets its processes to stop.
    fn stubborn() -> (tempfile::TempDir, UserGroup) {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("cgroup.procs", ""),
            ("cgroup.freeze", "0"),
            ("cgroup.events", "populated 1\nfrozen 0\n"),
        ] {
            fs::write(directory.path().join(name), text).unwrap();
        }
        let group = UserGroup::open(directory.path()).unwrap();
        (directory, group)
    }

    fn state(directory: &tempfile::TempDir) -> String {
        fs::read_to_string(directory.path().join("cgroup.freeze")).unwrap()
    }

    #[tokio::test]
    async fn a_freeze_that_takes_too_long_is_undone() {
        let (directory, group) = stubborn();
        let error = group.freeze(Duration::from_millis(1)).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::Timeout);
        assert_eq!(
            (state(&directory).as_str(), group.is_frozen()),
            ("0", false)
        );
    }

    #[tokio::test]
    async fn a_freeze_that_is_given_up_is_undone() {
        let (directory, group) = stubborn();
        let freezing = group.freeze(Duration::from_secs(3600));
        assert!(
            tokio::time::timeout(Duration::from_millis(1), freezing)
                .await
                .is_err()
        );
        assert_eq!(
            (state(&directory).as_str(), group.is_frozen()),
            ("0", false)
        );
    }

    #[tokio::test]
    async fn freezing_and_thawing_may_be_repeated() {
        let (directory, group) = stubborn();
        fs::write(directory.path().join("cgroup.events"), "frozen 1\n").unwrap();
        let limit = Duration::from_secs(1);
        assert!(!group.freeze(limit).await.unwrap().was_frozen);
        assert!(group.freeze(limit).await.unwrap().was_frozen);
        assert_eq!((state(&directory).as_str(), group.is_frozen()), ("1", true));
        assert!(group.thaw().unwrap());
        assert!(!group.thaw().unwrap());
        assert_eq!(
            (state(&directory).as_str(), group.is_frozen()),
            ("0", false)
        );
    }
}
