//! The Firecracker process: starting it, and noticing its end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use forkd_sys::jail::end_with_parent;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thiserror::Error;

use crate::api::Api;

/// Firecracker's API socket, below the working directory.
const API_SOCKET: &str = "api.sock";
/// How long a new process may take to listen.
const LISTEN: Duration = Duration::from_secs(20);
/// How long to wait between two looks at the socket.
const PAUSE: Duration = Duration::from_millis(1);

/// Why Firecracker did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The program did not run.
    #[error("Firecracker did not start: {}", program.display())]
    Spawn {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The process cannot be watched.
    #[error("the Firecracker process cannot be watched")]
    Watch(#[source] io::Error),
    /// The process ended before it listened.
    #[error("Firecracker ended at once: {status}")]
    Ended { status: ExitStatus },
    /// The process runs and does not listen.
    #[error("Firecracker did not listen on its API socket within {} s", LISTEN.as_secs())]
    Deaf,
}

/// A running Firecracker. Dropping it ends the process.
#[derive(Debug)]
pub struct Firecracker {
    child: Child,
    pidfd: OwnedFd,
    api: Api,
}

impl Firecracker {
    /// Starts the program in the working directory of this process and waits until it listens.
    pub fn start(program: &Path) -> Result<Self, StartError> {
        let failed = |source| StartError::Spawn {
            program: program.to_owned(),
            source,
        };
        let mut command = Command::new(program);
        command
            .args(["--api-sock", API_SOCKET, "--id", "vm", "--level", "Error"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .env_clear();
        let child = end_with_parent(&mut command).spawn().map_err(failed)?;
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())
            .map_err(|error| StartError::Watch(error.into()))?;
        let mut process = Self {
            child,
            pidfd,
            api: Api::new(Path::new(API_SOCKET)),
        };
        process.wait_until_it_listens()?;
        Ok(process)
    }

    fn wait_until_it_listens(&mut self) -> Result<(), StartError> {
        let end = Instant::now() + LISTEN;
        while !self.api.listens() {
            if let Some(status) = self.ended() {
                return Err(StartError::Ended { status });
            }
            if Instant::now() > end {
                return Err(StartError::Deaf);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// The API of the process.
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// The pipe that the guest's console comes through. It can be taken once.
    pub fn take_console(&mut self) -> Option<ChildStdout> {
        self.child.stdout.take()
    }

    /// The exit status, once the process has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }
}

impl AsFd for Firecracker {
    /// Readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Drop for Firecracker {
    fn drop(&mut self) {
        // The only failure left is that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
