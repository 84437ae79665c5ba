//! Identifies processes safely.
//!
//! The kernel reuses process IDs, so a [`ProcessIdentity`] combines the process ID with the start time.
//! Signals go through a pidfd ([`ProcessHandle`]), which never refers to another process.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// A process ID with its start time, which distinguishes the process from later ones with the same ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub pid: i32,
    /// Start time in clock ticks after boot.
    pub start_ticks: u64,
}

impl ProcessIdentity {
    /// The process that has this process ID now.
    #[must_use]
    pub fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (state, start_ticks) = parse_stat(&stat)?;
        (state != 'Z' && state != 'X').then_some(Self { pid, start_ticks })
    }

    #[must_use]
    pub fn is_alive(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }

    /// A handle for signals. `None` if the process has ended.
    pub(crate) fn handle(&self) -> io::Result<Option<ProcessHandle>> {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return Ok(None);
        };
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        // The check comes after the handle, so that it is about the process the handle is on.
        Ok(self.is_alive().then_some(ProcessHandle { fd }))
    }

    pub(crate) fn command_line(&self) -> Vec<String> {
        fs::read(format!("/proc/{}/cmdline", self.pid))
            .unwrap_or_default()
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect()
    }
}

/// A pidfd: signals reach this process or no process.
#[derive(Debug)]
pub struct ProcessHandle {
    fd: OwnedFd,
}

impl ProcessHandle {
    /// Sends SIGKILL to the process.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits for the end of the process. Returns `false` after the timeout.
    pub fn wait(&self, limit: Duration) -> io::Result<bool> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = rustix::event::Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&timeout)) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// Parses state and start time. The name in parentheses may contain any character, so the fields are counted
/// from the last closing parenthesis.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let after_name = stat.get(stat.rfind(')')? + 1..)?;
    let mut fields = after_name.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let start_ticks = fields.nth(18)?.parse().ok()?;
    Some((state, start_ticks))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_name_with_parentheses_does_not_confuse() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4 1 0 0 0 1 2 0 0 20 0 1 0 4242 99 1";
        assert_eq!(parse_stat(stat), Some(('S', 4242)));
        assert_eq!(parse_stat("garbage"), None);
    }

    #[test]
    fn a_reused_pid_is_another_process() {
        let me = ProcessIdentity::of(std::process::id() as i32).unwrap();
        assert!(me.is_alive());
        let earlier = ProcessIdentity {
            start_ticks: me.start_ticks - 1,
            ..me
        };
        assert!(!earlier.is_alive());
        assert!(earlier.handle().unwrap().is_none());
    }

    #[test]
    fn a_killed_process_is_seen_to_end() {
        let mut child = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let identity = ProcessIdentity::of(child.id() as i32).unwrap();
        let handle = identity.handle().unwrap().unwrap();
        assert!(!handle.wait(Duration::ZERO).unwrap());
        handle.kill().unwrap();
        assert!(handle.wait(Duration::from_secs(20)).unwrap());
        child.wait().unwrap();
        assert!(!identity.is_alive());
    }
}
