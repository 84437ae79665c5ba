//! A forked child that writes frozen memory out.
//!
//! [`ChildWriter`] forks with a raw `clone`, so the child has the memory of that moment while the parent goes
//! on. The child must neither allocate nor take a lock: another thread may have held it at the fork. The child
//! dies with its parent, and with the `ChildWriter` that is dropped.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use thiserror::Error;

/// Why no child came to be, or how it ended.
#[derive(Debug, Error)]
pub enum ForkError {
    /// The kernel refused to fork.
    #[error("cannot fork the process that writes memory out")]
    Fork(#[source] io::Error),
    /// The child cannot be waited for.
    #[error("cannot wait for the process that writes memory out")]
    Wait(#[source] io::Error),
    /// The child did not end by itself.
    #[error("the process that writes memory out was ended by signal {signal}")]
    Killed { signal: i32 },
}

/// Exit status of a child whose parent ended before the child began.
const ORPHAN: u8 = u8::MAX;

/// A child that shares this process's memory as of the moment it was forked.
#[derive(Debug)]
pub struct ChildWriter {
    pidfd: OwnedFd,
    reaped: bool,
}

impl ChildWriter {
    /// Forks. The child runs `work` and exits with the status it gives; it is killed when the thread
    /// that forked it ends.
    ///
    /// The child is a copy of a process with several threads of which only this one goes on, so `work`
    /// must neither allocate nor take a lock: another thread may have held it at the moment of the fork.
    pub fn fork(work: impl FnOnce() -> u8) -> Result<Self, ForkError> {
        let parent = rustix::process::getpid();
        let mut pidfd: libc::c_int = -1;
        let flags = libc::CLONE_PIDFD as libc::c_long | libc::SIGCHLD as libc::c_long;
        // SAFETY: without CLONE_VM and with no stack given this is fork(2): the child goes on with a
        // copy of this stack. It leaves by _exit below and never returns into code that other threads
        // share locks with. `pidfd` is a valid place for the descriptor.
        let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, &raw mut pidfd, 0, 0) };
        if pid < 0 {
            return Err(ForkError::Fork(io::Error::last_os_error()));
        }
        if pid == 0 {
            // SAFETY: plain system calls; the child has no other threads.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
            // The death signal is not sent for a parent that ended before it was requested.
            let orphan = rustix::process::getppid() != Some(parent);
            let status = if orphan { ORPHAN } else { work() };
            // SAFETY: ends the child without running exit handlers that belong to the parent.
            unsafe { libc::syscall(libc::SYS_exit_group, libc::c_int::from(status)) };
            unreachable!("exit_group returned");
        }
        // SAFETY: the kernel filled in a new descriptor that nothing else owns.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
        Ok(Self {
            pidfd,
            reaped: false,
        })
    }

    /// Waits for the child and gives its status.
    pub fn wait(mut self) -> Result<u8, ForkError> {
        self.reaped = true;
        loop {
            let status = rustix::process::waitid(
                rustix::process::WaitId::PidFd(self.pidfd.as_fd()),
                rustix::process::WaitIdOptions::EXITED,
            );
            return match status {
                Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                    (Some(code), _) => Ok(code as u8),
                    (None, signal) => Err(ForkError::Killed {
                        signal: signal.unwrap_or(0),
                    }),
                },
                Ok(None) | Err(rustix::io::Errno::INTR) => continue,
                Err(e) => Err(ForkError::Wait(e.into())),
            };
        }
    }
}

/// Readable once the child has ended.
impl AsFd for ChildWriter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Kills a child that was not waited for.
impl Drop for ChildWriter {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
        let _ = rustix::process::waitid(
            rustix::process::WaitId::PidFd(self.pidfd.as_fd()),
            rustix::process::WaitIdOptions::EXITED,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn the_child_sees_memory_as_it_was() {
        let file = tempfile::tempfile().unwrap();
        let mut data = vec![1u8; 4096];
        let (hold, release) = std::io::pipe().unwrap();
        let child = ChildWriter::fork(|| {
            let mut byte = [0];
            let _ = rustix::io::read(&hold, &mut byte);
            match file.write_at(&data, 0) {
                Ok(4096) => 3,
                _ => 4,
            }
        })
        .unwrap();
        data.fill(2);
        rustix::io::write(&release, &[0]).unwrap();
        assert_eq!(child.wait().unwrap(), 3);
        let mut seen = vec![0u8; 4096];
        file.read_exact_at(&mut seen, 0).unwrap();
        assert!(seen.iter().all(|&b| b == 1));
    }

    #[test]
    fn a_child_that_dies_is_reported() {
        let child = ChildWriter::fork(|| {
            let _ = rustix::process::kill_process(
                rustix::process::getpid(),
                rustix::process::Signal::KILL,
            );
            0
        })
        .unwrap();
        assert!(matches!(child.wait(), Err(ForkError::Killed { signal: 9 })));
    }
}
