//! The attempts to leave the jail.

use std::io;
use std::net::Ipv4Addr;

use forkd_sys::filter_probe::{
    make_page_executable, map_executable_page, run_program, signal_thread, trace_process,
};
use forkd_sys::{ChildWriter, FORBIDDEN_CALL_STATUS, ForkError, Pagemap};
use forkd_vmm_proto::spawn::{Wall, Walls};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::net::{AddressFamily, SocketAddrV4, SocketType};
use rustix::process::{Uid, getpid, getuid};
use rustix::thread::{CapabilitySet, capabilities, no_new_privs};

use crate::program::seccomp;

const SIGSYS: i32 = 31;

/// The facts that the process inside knows.
pub struct Seen {
    pub walls: Walls,
    pub outside: i32,
    pub user_before: Uid,
}

/// An attempt, and the walls of which one has to stand for it to fail without a filter. Without any named wall, only
/// the filter stops it.
type Attempt<'a> = (
    &'static str,
    &'static [Wall],
    &'a dyn Fn() -> io::Result<()>,
);

/// Checks what the process is. Returns the number of breaches.
pub fn facts(seen: &Seen) -> usize {
    let none = |sets: rustix::thread::CapabilitySets| {
        (sets.effective | sets.permitted | sets.inheritable).is_empty()
    };
    let bounding = (0..41)
        .map(|number| CapabilitySet::from_bits_retain(1 << number))
        .any(|one| rustix::thread::capability_is_in_bounding_set(one).unwrap_or(false));
    let alone = seen.walls.contains(Wall::Namespaces);
    let facts = [
        ("no capability", true, capabilities(None).is_ok_and(none)),
        ("no capability to be had", alone, !bounding),
        ("no new privileges", true, no_new_privs().unwrap_or(false)),
        (
            "process ID 1 of its namespace",
            alone,
            getpid().as_raw_pid() == 1,
        ),
        (
            "a user ID of its own",
            seen.walls.contains(Wall::User),
            getuid() != seen.user_before && !getuid().is_root(),
        ),
        ("no inherited descriptor", true, open_descriptors() <= 4),
    ];
    facts
        .into_iter()
        .filter(|(_, wanted, _)| *wanted)
        .filter(|(name, _, holds)| {
            println!("{} {name}", if *holds { "held  " } else { "BREACH" });
            !holds
        })
        .count()
}

/// Standard streams and the control socket are four.
fn open_descriptors() -> usize {
    (0..1024)
        .filter(|number| forkd_sys::jail::is_open(*number))
        .count()
}

/// Makes each attempt without and with each filter. Returns the number of breaches.
pub fn attempts(seen: &Seen) -> Result<usize, ForkError> {
    let file = |path: &'static str, flags: OFlags| {
        move || {
            open(path, flags, Mode::RUSR)
                .map(drop)
                .map_err(io::Error::from)
        }
    };
    let read = file("/etc/passwd", OFlags::RDONLY);
    let root = file("/", OFlags::RDONLY | OFlags::DIRECTORY);
    let create = file("/left-behind", OFlags::WRONLY | OFlags::CREATE);
    let proc = file("/proc/self/status", OFlags::RDONLY);
    let signal = || signal_thread(seen.outside, seen.outside, 0);
    let trace = || trace_process(seen.outside);
    let paths: &[Wall] = &[Wall::Namespaces, Wall::Landlock];
    let others: &[Wall] = &[Wall::Namespaces, Wall::User, Wall::Landlock];
    let list: [Attempt<'_>; 15] = [
        ("open a path", paths, &read),
        ("list the root", &[Wall::Landlock], &root),
        ("make a file", paths, &create),
        ("read /proc", paths, &proc),
        ("signal the process outside", others, &signal),
        ("trace the process outside", others, &trace),
        (
            "reach a TCP port of the host",
            &[Wall::Namespaces],
            &connect,
        ),
        ("mount", others, &mount),
        ("change the root", others, &chroot),
        ("become root", others, &become_root),
        ("make a socket", &[], &socket),
        (
            "map memory that can be written and run",
            &[],
            &map_executable_page,
        ),
        ("make memory executable", &[], &make_page_executable),
        ("run a program", &[], &run_program),
        ("make a namespace", &[], &|| {
            forkd_sys::jail::make_namespace().map_err(io::Error::from)
        }),
    ];
    let mut breaches = 0;
    for (name, walls, attempt) in list {
        let bare = bare(seen.walls, walls, attempt);
        let filtered = filtered(attempt)?;
        let held = !matches!(bare, Bare::Reached) && filtered;
        breaches += usize::from(!held);
        println!(
            "{} {name}: {}, {}",
            if held { "held  " } else { "BREACH" },
            match bare {
                Bare::NotTried => "not tried without a filter".to_owned(),
                Bare::Refused(error) => error.to_string(),
                Bare::Reached => "allowed without a filter".to_owned(),
            },
            if filtered {
                "every filter ends the process"
            } else {
                "a filter allows it"
            },
        );
    }
    breaches += usize::from(!no_frames());
    Ok(breaches)
}

enum Bare {
    NotTried,
    Refused(io::Error),
    Reached,
}

/// Makes an attempt without a filter if one of its walls stands.
fn bare(have: Walls, walls: &[Wall], attempt: &dyn Fn() -> io::Result<()>) -> Bare {
    if !walls.iter().any(|wall| have.contains(*wall)) {
        return Bare::NotTried;
    }
    match attempt() {
        Ok(()) => Bare::Reached,
        Err(error) => Bare::Refused(error),
    }
}

/// Whether the filter of each kind of thread ends a process that makes the attempt.
fn filtered(attempt: &dyn Fn() -> io::Result<()>) -> Result<bool, ForkError> {
    for program in seccomp::programs() {
        let child = ChildWriter::fork(|| {
            if seccompiler::apply_filter(&program).is_err() {
                return 1;
            }
            let _ = attempt();
            0
        })?;
        match child.wait() {
            Ok(status) if i32::from(status) == FORBIDDEN_CALL_STATUS => {}
            Err(ForkError::Killed { signal: SIGSYS }) => {}
            Ok(_) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// The process has no page map of its own; one that it could open would be a breach of its own kind.
fn no_frames() -> bool {
    let held = Pagemap::open().is_err();
    println!(
        "{} open the page map",
        if held { "held  " } else { "BREACH" }
    );
    held
}

fn socket() -> io::Result<()> {
    Ok(rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).map(drop)?)
}

/// A refused connection has reached a host.
fn connect() -> io::Result<()> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    let port = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1);
    match rustix::net::connect(&socket, &port) {
        Err(Errno::CONNREFUSED) => Ok(()),
        answer => Ok(answer?),
    }
}

fn mount() -> io::Result<()> {
    Ok(rustix::mount::mount(
        "x",
        "/",
        "tmpfs",
        MountFlags::empty(),
        None,
    )?)
}

fn chroot() -> io::Result<()> {
    Ok(rustix::process::chroot("/")?)
}

fn become_root() -> io::Result<()> {
    Ok(rustix::thread::set_thread_uid(Uid::ROOT)?)
}
