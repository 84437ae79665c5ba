//! `forkd-broker --self-test-jail`: the broker confines itself as it does to serve, and tries to get out.
//!
//! Each attempt is made in a forked process under the system call filter, and those that a wall of the kernel stops are
//! also made without it. One line per attempt: `held` or `BREACH`; `absent` for a wall that this host does not have. The
//! exit status is 0 without a breach.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;

use forkd_net_proto::NetWall;
use forkd_sys::filter_probe::{
    make_page_executable, map_executable_page, run_program, signal_thread, trace_process,
};
use forkd_sys::{ChildWriter, FORBIDDEN_CALL_STATUS, ForkError};
use rustix::fs::{Mode, OFlags, open};
use rustix::net::{AddressFamily, SocketType, connect, socket};
use rustix::thread::{capabilities, no_new_privs};
use seccompiler::{BpfProgram, apply_filter};

use super::{ConfineError, enter, filter};

const SIGSYS: i32 = 31;

/// The wall that stops an attempt without the filter. `None` if only the filter does.
type Attempt<'a> = (
    &'static str,
    Option<NetWall>,
    &'a dyn Fn() -> io::Result<()>,
);

/// Tries every wall and returns whether all held.
pub fn run() -> Result<bool, ConfineError> {
    let parent = rustix::process::getppid().map_or(1, |parent| parent.as_raw_pid());
    let program = filter()?;
    let walls = enter(Path::new("self-test"))?;
    for missing in &walls.missing {
        println!("absent {}: {}", missing.wall.name(), missing.reason);
    }
    let none = capabilities(None)
        .is_ok_and(|sets| (sets.effective | sets.permitted | sets.inheritable).is_empty());
    let mut held = shown(none, "no capability");
    held &= shown(no_new_privs().unwrap_or(false), "no new privileges");
    if walls.stands(Some(NetWall::User)) {
        held &= shown(!rustix::process::getuid().is_root(), "a user ID of its own");
    }
    let read = || file("/usr/bin/env", OFlags::RDONLY);
    let create = || file("/tmp/left-behind", OFlags::WRONLY | OFlags::CREATE);
    let proc = || file("/proc/self/environ", OFlags::RDONLY);
    let signal = || signal_thread(parent, parent, 0);
    let trace = || trace_process(parent);
    let tcp = || Ok(socket(AddressFamily::INET, SocketType::STREAM, None).map(drop)?);
    let udp = || Ok(socket(AddressFamily::INET, SocketType::DGRAM, None).map(drop)?);
    let unix = || Ok(socket(AddressFamily::UNIX, SocketType::STREAM, None).map(drop)?);
    let inherited = socket(AddressFamily::INET, SocketType::DGRAM, None).ok();
    let dial = || match &inherited {
        Some(socket) => Ok(connect(socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 9))?),
        None => Ok(()),
    };
    let landlock = Some(NetWall::Landlock);
    let list: [Attempt<'_>; 12] = [
        ("open a path", landlock, &read),
        ("read /proc", landlock, &proc),
        ("make a file", landlock, &create),
        ("signal the parent", Some(NetWall::User), &signal),
        ("trace the parent", landlock, &trace),
        ("make a TCP socket", None, &tcp),
        ("make a UDP socket", None, &udp),
        ("make a Unix socket", None, &unix),
        ("connect a socket", None, &dial),
        ("map executable memory", None, &map_executable_page),
        ("make memory executable", None, &make_page_executable),
        ("run a program", None, &run_program),
    ];
    for (name, wall, attempt) in list {
        if walls.stands(wall) {
            held &= shown(attempt().is_err(), name);
        }
        let ended = matches!(filtered(&program, attempt), Ok(true));
        held &= shown(ended, &format!("{name}: the filter ends the process"));
    }
    let random = || {
        let flags = rustix::rand::GetRandomFlags::empty();
        Ok(rustix::rand::getrandom(&mut [0u8; 32], flags).map(drop)?)
    };
    let works = matches!(filtered(&program, &random), Ok(false));
    println!(
        "{} get random bytes",
        if works { "works " } else { "BREACH" }
    );
    Ok(held && works)
}

fn shown(held: bool, text: &str) -> bool {
    println!("{} {text}", if held { "held  " } else { "BREACH" });
    held
}

fn file(path: &str, flags: OFlags) -> io::Result<()> {
    Ok(open(path, flags, Mode::RUSR).map(drop)?)
}

/// Makes an attempt in a process under the filter: whether the filter ended the process.
fn filtered(program: &BpfProgram, attempt: &dyn Fn() -> io::Result<()>) -> Result<bool, ForkError> {
    let child = ChildWriter::fork(|| {
        if apply_filter(program).is_err() {
            return 1;
        }
        u8::from(attempt().is_err())
    })?;
    match child.wait() {
        Ok(0) => Ok(false),
        Ok(status) if i32::from(status) == FORBIDDEN_CALL_STATUS => Ok(true),
        Err(ForkError::Killed { signal: SIGSYS }) => Ok(true),
        Ok(_) => Err(ForkError::Killed { signal: 0 }),
        Err(error) => Err(error),
    }
}
