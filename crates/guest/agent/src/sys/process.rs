//! Children of the agent: set up, signalled and reaped.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use forkd_guest_proto::{ExitStatus, ResourceUsage, Rlimit, RlimitResource};

/// How a child ended.
#[derive(Debug, Clone, Copy)]
pub struct Reaped {
    pub status: ExitStatus,
    pub usage: ResourceUsage,
}

/// Waits for one child that has ended; `None` when there is none.
pub fn reap_one() -> Option<(u32, Reaped)> {
    loop {
        let mut status = 0;
        // SAFETY: an all-zero rusage is a valid value, and both pointers are to live locals.
        let (pid, usage) = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            (
                libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage),
                usage,
            )
        };
        if pid < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {
            continue;
        }
        let pid = u32::try_from(pid).ok().filter(|pid| *pid > 0)?;
        let status = if libc::WIFEXITED(status) {
            ExitStatus::Code(libc::WEXITSTATUS(status))
        } else {
            ExitStatus::Signal(libc::WTERMSIG(status))
        };
        let micros = |time: libc::timeval| {
            let whole = u64::try_from(time.tv_sec)
                .unwrap_or(0)
                .saturating_mul(1_000_000);
            whole.saturating_add(u64::try_from(time.tv_usec).unwrap_or(0))
        };
        let usage = ResourceUsage {
            user_us: micros(usage.ru_utime),
            system_us: micros(usage.ru_stime),
            max_rss_kib: u64::try_from(usage.ru_maxrss).unwrap_or(0),
        };
        return Some((pid, Reaped { status, usage }));
    }
}

/// The set-up of a child between fork and exec.
pub struct ChildSetup {
    pub controlling_terminal: bool,
    pub identity: Option<(u32, u32, Vec<u32>)>,
    pub rlimits: Vec<Rlimit>,
    /// `cgroup.procs` of the group it joins.
    pub cgroup: Option<OwnedFd>,
}

/// Makes the child of `command` a session of its own with this set-up.
pub fn prepare_child(command: &mut Command, setup: ChildSetup) {
    let limits: Vec<_> = setup.rlimits.iter().map(raw_limit).collect();
    // SAFETY: between fork and exec the closure makes only system calls; everything it reads was built
    // before the fork and it allocates nothing.
    unsafe {
        command.pre_exec(move || {
            reset_signals();
            if libc::setsid() < 0 {
                return Err(io::Error::last_os_error());
            }
            if setup.controlling_terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
            leave_the_agents_privileges(setup.cgroup.as_ref());
            for (resource, limit) in &limits {
                if libc::setrlimit(*resource, limit) < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            match &setup.identity {
                Some((uid, gid, groups)) => become_user(*uid, *gid, groups),
                None => Ok(()),
            }
        });
    }
}

unsafe fn reset_signals() {
    // SAFETY: called in the child between fork and exec; the set is a live local.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
    }
}

/// The agent shields itself from the out-of-memory killer and may live in a cgroup of its own and at a
/// better priority; its children do not. Where that cannot be undone there was nothing to undo.
unsafe fn leave_the_agents_privileges(cgroup: Option<&OwnedFd>) {
    // SAFETY: called in the child between fork and exec; all pointers are to constants.
    unsafe {
        if let Some(cgroup) = cgroup {
            libc::write(cgroup.as_raw_fd(), c"0".as_ptr().cast(), 1);
        }
        let fd = libc::open(
            c"/proc/self/oom_score_adj".as_ptr(),
            libc::O_WRONLY | libc::O_CLOEXEC,
        );
        if fd >= 0 {
            libc::write(fd, c"0".as_ptr().cast(), 1);
            libc::close(fd);
        }
        libc::setpriority(libc::PRIO_PROCESS, 0, 0);
    }
}

unsafe fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: called in the child between fork and exec, which has one thread, so the plain calls act on
    // the whole process; the group list outlives the call.
    let failed = unsafe {
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) < 0
            || libc::syscall(libc::SYS_setgid, gid) < 0
            || libc::syscall(libc::SYS_setuid, uid) < 0
    };
    if failed {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn raw_limit(limit: &Rlimit) -> (libc::__rlimit_resource_t, libc::rlimit) {
    let resource = match limit.resource {
        RlimitResource::As => libc::RLIMIT_AS,
        RlimitResource::Core => libc::RLIMIT_CORE,
        RlimitResource::Cpu => libc::RLIMIT_CPU,
        RlimitResource::Data => libc::RLIMIT_DATA,
        RlimitResource::Fsize => libc::RLIMIT_FSIZE,
        RlimitResource::Memlock => libc::RLIMIT_MEMLOCK,
        RlimitResource::Nofile => libc::RLIMIT_NOFILE,
        RlimitResource::Nproc => libc::RLIMIT_NPROC,
        RlimitResource::Stack => libc::RLIMIT_STACK,
    };
    let value = limit.limit.unwrap_or(libc::RLIM_INFINITY);
    (
        resource,
        libc::rlimit {
            rlim_cur: value,
            rlim_max: value,
        },
    )
}

/// Gives the agent a better priority than user processes have.
pub fn raise_priority() {
    // SAFETY: a plain call about this process itself.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) };
}

/// Sends a signal to every process but this one. Only for the first process of a machine.
pub fn signal_everybody(signal: rustix::process::Signal) {
    if std::process::id() == 1 {
        // SAFETY: plain numbers.
        unsafe { libc::kill(-1, signal.as_raw()) };
    }
}

/// Some process is there besides this one and the kernel's own.
pub fn anybody_else() -> bool {
    // SAFETY: plain numbers; no signal is sent.
    std::process::id() == 1 && unsafe { libc::kill(-1, 0) } == 0
}
