//! `forkd-net --self-test-jail`: the engine confines itself as it does to serve, and tries to get out.
//!
//! Each attempt is made twice: as the process is, and in a forked process under the system call filter. One line per
//! attempt: `held` with the error that stopped it, `BREACH` if nothing did, `absent` for a wall that this host does not
//! have. The exit status is 0 without a breach.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;

use forkd_net_proto::{NetWall, NetWalls};
use forkd_sys::filter_probe::{
    make_page_executable, map_executable_page, run_program, signal_thread, trace_process,
};
use forkd_sys::{ChildWriter, FORBIDDEN_CALL_STATUS, ForkError};
use rustix::fs::{Mode, OFlags, open};
use rustix::mount::MountFlags;
use rustix::net::{AddressFamily, SocketType, bind, socket};
use rustix::process::{Uid, getuid};
use rustix::thread::{CapabilitySets, capabilities, no_new_privs};
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
    let before = getuid();
    let program = filter()?;
    let walls = enter(Path::new("self-test"))?;
    for missing in &walls.missing {
        println!("absent {}: {}", missing.wall.name(), missing.reason);
    }
    let facts = facts(&walls, before);
    let attempts = attempts(&walls, parent, &program);
    let needs = needs(&program);
    Ok(facts && attempts && needs)
}

fn shown(held: bool, text: &str) -> bool {
    println!("{} {text}", if held { "held  " } else { "BREACH" });
    held
}

fn facts(walls: &NetWalls, before: Uid) -> bool {
    let none =
        |sets: CapabilitySets| (sets.effective | sets.permitted | sets.inheritable).is_empty();
    let mut held = shown(capabilities(None).is_ok_and(none), "no capability");
    held &= shown(no_new_privs().unwrap_or(false), "no new privileges");
    if walls.standing.contains(&NetWall::User) {
        let own = getuid() != before && !getuid().is_root();
        held &= shown(own, "a user ID of its own");
    }
    held
}

fn attempts(walls: &NetWalls, parent: i32, program: &BpfProgram) -> bool {
    let file = |path: &'static str, flags: OFlags| {
        move || {
            open(path, flags, Mode::RUSR)
                .map(drop)
                .map_err(io::Error::from)
        }
    };
    let read = file("/usr/bin/env", OFlags::RDONLY);
    let create = file("/tmp/left-behind", OFlags::WRONLY | OFlags::CREATE);
    let proc = file("/proc/1/status", OFlags::RDONLY);
    let signal = || signal_thread(parent, parent, 0);
    let trace = || trace_process(parent);
    let unix = || Ok(socket(AddressFamily::UNIX, SocketType::STREAM, None).map(drop)?);
    let raw = || Ok(socket(AddressFamily::INET, SocketType::RAW, None).map(drop)?);
    let netlink = || Ok(socket(AddressFamily::NETLINK, SocketType::RAW, None).map(drop)?);
    let namespace = || forkd_sys::jail::make_namespace().map_err(io::Error::from);
    let landlock = Some(NetWall::Landlock);
    let rights = Some(NetWall::Capabilities);
    // Reading a path is allowed to the filter, since the name servers are read again.
    let mut held = true;
    for (name, wall, attempt) in [
        (
            "open a path",
            landlock,
            &read as &dyn Fn() -> io::Result<()>,
        ),
        ("read /proc", landlock, &proc),
    ] {
        if walls.stands(wall) {
            held &= shown(attempt().is_err(), name);
        }
    }
    let list: [Attempt<'_>; 14] = [
        ("make a file", landlock, &create),
        ("signal the parent", Some(NetWall::User), &signal),
        ("trace the parent", landlock, &trace),
        ("listen on a TCP port", None, &listen),
        ("mount", rights, &mount),
        ("change the root", rights, &chroot),
        ("become root", rights, &become_root),
        ("make a raw socket", rights, &raw),
        ("make a Unix socket", None, &unix),
        ("make a netlink socket", None, &netlink),
        ("make a namespace", None, &namespace),
        ("map executable memory", None, &map_executable_page),
        ("make memory executable", None, &make_page_executable),
        ("run a program", None, &run_program),
    ];
    for (name, wall, attempt) in list {
        if walls.stands(wall) {
            held &= shown(attempt().is_err(), name);
        }
        let ended = matches!(filtered(program, attempt), Ok(Ended::ByFilter));
        held &= shown(ended, &format!("{name}: the filter ends the process"));
    }
    held
}

/// The engine must still be able to do its work: these may not fail.
fn needs(program: &BpfProgram) -> bool {
    let tcp = || Ok(socket(AddressFamily::INET, SocketType::STREAM, None).map(drop)?);
    let udp = || Ok(socket(AddressFamily::INET6, SocketType::DGRAM, None).map(drop)?);
    let list: [(&str, &dyn Fn() -> io::Result<()>); 2] =
        [("make a TCP socket", &tcp), ("make a UDP socket", &udp)];
    let mut works = true;
    for (name, need) in list {
        let done = matches!(filtered(program, need), Ok(Ended::ByItself));
        let word = if done { "works " } else { "BREACH" };
        println!("{word} {name}");
        works &= done;
    }
    works
}

enum Ended {
    ByFilter,
    ByItself,
}

/// Makes an attempt in a process under the filter.
fn filtered(
    program: &BpfProgram,
    attempt: &dyn Fn() -> io::Result<()>,
) -> Result<Ended, ForkError> {
    let child = ChildWriter::fork(|| {
        if apply_filter(program).is_err() {
            return 1;
        }
        u8::from(attempt().is_err())
    })?;
    match child.wait() {
        Ok(0) => Ok(Ended::ByItself),
        Ok(status) if i32::from(status) == FORBIDDEN_CALL_STATUS => Ok(Ended::ByFilter),
        Err(ForkError::Killed { signal: SIGSYS }) => Ok(Ended::ByFilter),
        Ok(_) => Err(ForkError::Killed { signal: 0 }),
        Err(error) => Err(error),
    }
}

/// Kernels before 6.7 have no Landlock for ports, so only the filter counts.
fn listen() -> io::Result<()> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    Ok(bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?)
}

fn mount() -> io::Result<()> {
    let flags = MountFlags::empty();
    Ok(rustix::mount::mount("x", "/", "tmpfs", flags, None)?)
}

fn chroot() -> io::Result<()> {
    Ok(rustix::process::chroot("/")?)
}

fn become_root() -> io::Result<()> {
    Ok(rustix::thread::set_thread_uid(Uid::ROOT)?)
}
