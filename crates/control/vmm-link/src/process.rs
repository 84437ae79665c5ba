//! VMM processes, seen from outside.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};

/// How long a killed process may take to give its memory back.
pub(crate) const KILL: Duration = Duration::from_secs(60);

/// A VMM process by its pidfd. It can be ended even after `forkd-spawn` is gone.
#[derive(Debug)]
pub struct Process {
    pidfd: OwnedFd,
}

impl Process {
    /// Takes over a pidfd.
    pub fn new(pidfd: OwnedFd) -> Self {
        Self { pidfd }
    }

    /// Kills the process and returns once it has ended.
    pub async fn end(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
        let pidfd = self.pidfd.try_clone()?;
        tokio::task::spawn_blocking(move || wait(&pidfd))
            .await
            .map_err(io::Error::other)?
    }
}

/// Waits for the end of a process: then its pidfd is readable.
fn wait(pidfd: &OwnedFd) -> io::Result<()> {
    let end = Instant::now() + KILL;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[tokio::test]
    async fn a_process_that_does_not_end_by_itself_is_ended_and_so_is_one_that_has() {
        let mut child = std::process::Command::new("/bin/sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let process = Process::new(pidfd);
        process.end().await.unwrap();
        assert!(child.try_wait().unwrap().is_some());
        process.end().await.unwrap();
    }
}
