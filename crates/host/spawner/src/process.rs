//! VMM processes: starting them, and noticing their end.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use forkd_sys::jail::{StartedProcess, start_as_init};
use forkd_sys::{Channel, ChannelError};
use forkd_vmm_proto::spawn::HowEnded;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, pidfd_open,
    pidfd_send_signal, prlimit, waitid,
};
use thiserror::Error;

/// The most descriptors a VMM may hold open: disks, layers and vsock connections.
const VMM_MAX_FILES: u64 = 4096;

/// How much sooner than others a VMM is killed when the host runs out of memory.
const OOM_SCORE: &str = "500";

/// A running VMM process and our end of its control socket.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    pidfd: OwnedFd,
    control: Channel,
}

/// Why a VMM process was not started.
#[derive(Debug, Error)]
pub enum StartError {
    /// No control socket.
    #[error("no control socket could be made")]
    Socket(#[source] ChannelError),
    /// The program did not start.
    #[error("{} did not start", program.display())]
    Start {
        program: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// It started but cannot be watched.
    #[error("the new VMM process cannot be watched")]
    Watch(#[source] rustix::io::Errno),
}

impl Process {
    /// Starts a VMM. Its control socket is its standard input, so that nothing else has to be inherited.
    /// With `new_pids` it is process ID 1 of a namespace of its own.
    pub fn start(
        program: &Path,
        arguments: &[OsString],
        new_pids: bool,
    ) -> Result<Self, StartError> {
        let (ours, theirs) = Channel::pair().map_err(StartError::Socket)?;
        // Only our end: the VMM blocks on its own.
        fcntl_setfl(&ours, OFlags::NONBLOCK).map_err(StartError::Watch)?;
        let started = if new_pids {
            start_in_namespace(program, arguments, &theirs)
        } else {
            start_here(program, arguments, theirs)
        };
        let StartedProcess { pid, pidfd } = started.map_err(|source| StartError::Start {
            program: program.to_owned(),
            source,
        })?;
        let process = Self {
            pid,
            pidfd,
            control: ours,
        };
        process.limit();
        Ok(process)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().cast_unsigned()
    }

    /// Readable once the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// The page map of the process, for the process itself. Only for one that has answered: before `execve` is done
    /// a process still has the address space of its parent.
    pub fn open_pagemap(&self) -> std::io::Result<OwnedFd> {
        forkd_sys::open_pagemap(self.pid)
    }

    /// The controller's end of the control socket.
    pub fn control(&self) -> &Channel {
        &self.control
    }

    /// Another descriptor for the controller's end.
    pub fn share_control(&self) -> std::io::Result<OwnedFd> {
        self.control.as_fd().try_clone_to_owned()
    }

    /// Another pidfd, for the controller: it can end the process even if this program is gone.
    pub fn share_pidfd(&self) -> std::io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Makes the kernel prefer this process when it runs out of memory: the daemon is protected from that, and its
    /// children inherit the protection.
    pub fn allow_oom_kill(&self) -> std::io::Result<()> {
        std::fs::write(format!("/proc/{}/oom_score_adj", self.pid()), OOM_SCORE)
    }

    /// Ends the process; its end is noticed like any other.
    pub fn kill(&self) {
        // The only failure left is that it has ended already.
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Collects the exit status if the process has ended.
    pub fn reap(&self) -> Option<HowEnded> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let status = waitid(WaitId::PidFd(self.pidfd.as_fd()), options).ok()??;
        Some(match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => HowEnded::Code(code.clamp(0, 255) as u8),
            (None, signal) => HowEnded::Signal(signal.unwrap_or(0).clamp(0, 255) as u8),
        })
    }

    /// Takes back what a VMM has no use for. A limit that cannot be set is no reason to refuse the VM:
    /// the values only get smaller.
    fn limit(&self) {
        let limit = |most| Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        let _ = prlimit(Some(self.pid), Resource::Nofile, limit(VMM_MAX_FILES));
        let _ = prlimit(Some(self.pid), Resource::Core, limit(0));
    }
}

const ARGS: [&str; 2] = ["--control-fd", "0"];

fn start_in_namespace(
    program: &Path,
    arguments: &[OsString],
    control: &Channel,
) -> std::io::Result<StartedProcess> {
    let nothing = std::fs::File::options().write(true).open("/dev/null")?;
    let all: Vec<&OsStr> = ARGS
        .iter()
        .map(OsStr::new)
        .chain(arguments.iter().map(OsString::as_os_str))
        .collect();
    start_as_init(program, &all, control.as_fd(), Some(nothing.as_fd()))
}

fn start_here(
    program: &Path,
    arguments: &[OsString],
    control: Channel,
) -> std::io::Result<StartedProcess> {
    let child = Command::new(program)
        .args(ARGS)
        .args(arguments)
        .stdin(Stdio::from(OwnedFd::from(control)))
        .stdout(Stdio::null())
        .current_dir("/")
        .env_clear()
        .spawn()?;
    let pid = Pid::from_child(&child);
    // Dropping a `Child` neither ends nor reaps it: from here on the pidfd is the handle.
    drop(child);
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(StartedProcess { pid, pidfd })
}

impl Drop for Process {
    /// A process without an owner must not live on.
    fn drop(&mut self) {
        if self.reap().is_none() {
            self.kill();
            let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_process_is_told_apart() {
        let ended = |program: &str| {
            let process = Process::start(Path::new(program), &[], false).unwrap();
            let mut polled = [rustix::event::PollFd::new(
                &process.pidfd,
                rustix::event::PollFlags::IN,
            )];
            rustix::event::poll(&mut polled, None).unwrap();
            process.reap()
        };
        assert_eq!(ended("/bin/true"), Some(HowEnded::Code(0)));
        assert_eq!(ended("/bin/false"), Some(HowEnded::Code(1)));
    }

    #[test]
    fn a_vmm_is_killed_before_others_when_memory_runs_out() {
        let process = Process::start(Path::new("/bin/cat"), &[], false).unwrap();
        process.allow_oom_kill().unwrap();
        let score = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", process.pid()));
        assert_eq!(score.unwrap().trim(), "500");
    }

    #[test]
    fn a_missing_program_is_named() {
        for new_pids in [false, rustix::process::geteuid().is_root()] {
            let error = Process::start(Path::new("/nowhere/forkd-vmm"), &[], new_pids).unwrap_err();
            assert_eq!(error.to_string(), "/nowhere/forkd-vmm did not start");
        }
    }
}
