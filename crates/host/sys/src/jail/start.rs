//! Starting a program as process ID 1 of a new process namespace.
//!
//! `unshare` and `setns` would do for root, but the way back out of a new namespace is closed to a process in a user
//! namespace. So the new process is made by `clone`, which needs no way back.
#![allow(unsafe_code)]

use std::ffi::{CString, OsStr, c_char, c_int};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

/// A process that was started. Dropping this neither ends nor reaps the process.
#[derive(Debug)]
pub struct StartedProcess {
    pub pid: Pid,
    pub pidfd: OwnedFd,
}

/// Starts a program in `/`, with an empty environment. `stdout` of `None` is that of this process.
pub fn start_as_init(
    program: &Path,
    args: &[impl AsRef<OsStr>],
    stdin: BorrowedFd<'_>,
    stdout: Option<BorrowedFd<'_>>,
) -> io::Result<StartedProcess> {
    let path = CString::new(program.as_os_str().as_bytes())?;
    let args: Result<Vec<CString>, _> = args
        .iter()
        .map(|arg| CString::new(arg.as_ref().as_bytes()))
        .collect();
    let args = args?;
    let argv: Vec<*const c_char> = std::iter::once(&path)
        .chain(&args)
        .map(|arg| arg.as_ptr())
        .chain([std::ptr::null()])
        .collect();
    let envp: [*const c_char; 1] = [std::ptr::null()];
    let stdout = stdout.map_or(1, |fd| fd.as_raw_fd());
    // Both ends close on exec: the end of the pipe says that the program runs.
    let (mut failure, tell) = io::pipe()?;
    let started = clone_into_new_pids(|| {
        // SAFETY: the descriptors are open, the strings end with a zero and the lists with a null pointer. All of these
        // calls are async-signal-safe.
        unsafe {
            let ready = libc::dup2(stdin.as_raw_fd(), 0) == 0
                && (stdout == 1 || libc::dup2(stdout, 1) == 1)
                && libc::chdir(c"/".as_ptr()) == 0;
            if ready {
                libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr());
            }
            let errno = (*libc::__errno_location()).to_ne_bytes();
            libc::write(tell.as_raw_fd(), errno.as_ptr().cast(), errno.len());
        }
    })?;
    drop(tell);
    let mut errno = [0; size_of::<c_int>()];
    match failure.read_exact(&mut errno) {
        Err(_) => Ok(started),
        Ok(()) => {
            let _ = waitid(WaitId::PidFd(started.pidfd.as_fd()), WaitIdOptions::EXITED);
            Err(io::Error::from_raw_os_error(c_int::from_ne_bytes(errno)))
        }
    }
}

/// Makes the program of a command end when the thread that starts it ends.
pub fn end_with_parent(command: &mut std::process::Command) -> &mut std::process::Command {
    use std::os::unix::process::CommandExt;
    let ask = || {
        let signal = Some(rustix::process::Signal::KILL);
        Ok(rustix::process::set_parent_process_death_signal(signal)?)
    };
    // SAFETY: the closure makes one system call: it neither allocates nor takes a lock.
    unsafe { command.pre_exec(ask) }
}

/// Whether this process may make process namespaces.
pub(super) fn try_new_pids() -> io::Result<()> {
    let started = clone_into_new_pids(|| ())?;
    waitid(WaitId::PidFd(started.pidfd.as_fd()), WaitIdOptions::EXITED)?;
    Ok(())
}

/// Forks into a new process namespace. The child runs `work`, which must neither allocate nor take a lock, and exits.
fn clone_into_new_pids(work: impl FnOnce()) -> io::Result<StartedProcess> {
    let mut pidfd: c_int = -1;
    let flags = libc::c_long::from(libc::CLONE_NEWPID | libc::CLONE_PIDFD | libc::SIGCHLD);
    // SAFETY: without CLONE_VM and with no stack given this is fork(2): the child goes on with a copy of this stack and
    // leaves by exit_group below. `pidfd` is a valid place for the descriptor.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, &raw mut pidfd, 0, 0) };
    if pid == 0 {
        work();
        // SAFETY: ends the child without running exit handlers that belong to the parent.
        unsafe { libc::syscall(libc::SYS_exit_group, 127) };
        unreachable!("exit_group returned");
    }
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0);
    let Some(pid) = pid.and_then(Pid::from_raw) else {
        return Err(io::Error::last_os_error());
    };
    // SAFETY: the kernel filled in a new descriptor that nothing else owns.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(StartedProcess { pid, pidfd })
}
