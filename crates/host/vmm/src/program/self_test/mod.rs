//! `forkd-vmm --self-test-jail`: a VMM process tries to leave its jail, and reports what held it.
//!
//! ```text
//!   outside (run)      makes the walls as forkd-spawn does, and starts this program again
//!   inside  (inside)   enters the jail, then makes each attempt twice: as it is, and under each system call filter
//! ```
//!
//! One line per attempt: `held` with the wall or error that stopped it, `BREACH` if nothing did, `absent` for a wall
//! that this host does not have. The exit status is 0 if nothing is a breach.

mod attempts;

use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};

use forkd_sys::jail::{Cell, Prison, UserRange, close_other_descriptors, enter, start_as_init};
use forkd_sys::{Channel, inherited_fd, install_forbidden_call_handler};
use forkd_vmm_proto::spawn::{Wall, Walls};
use forkd_vmm_proto::{ExitCode, FdIndex, JailSpec, decode, encode};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions, pidfd_open, waitid};
use serde::{Deserialize, Serialize};

use super::chain;

type Failure = Box<dyn std::error::Error>;

/// The range that `forkd-spawn` gives to VMMs, for a single one.
const USERS: UserRange = UserRange {
    first: 1_900_000_000,
    count: 1,
};

/// The first message to the process inside.
#[derive(Debug, Serialize, Deserialize)]
struct Sentence {
    jail: JailSpec,
    walls: Walls,
    /// The process outside, which the one inside tries to reach.
    outside: i32,
}

/// The half outside.
pub fn run() -> ExitCode {
    match outside() {
        Ok(true) => ExitCode::Ok,
        Ok(false) => ExitCode::Internal,
        Err(error) => {
            println!(
                "BREACH the jail could not be tried: {}",
                chain(error.as_ref())
            );
            ExitCode::Internal
        }
    }
}

fn outside() -> Result<bool, Failure> {
    let program = std::env::current_exe()?;
    let prison = Prison::build(USERS);
    let mut walls = Walls::empty();
    for (wall, missing) in [
        (Wall::Namespaces, prison.void.as_ref().err()),
        (Wall::User, prison.users.as_ref().err()),
        (Wall::Landlock, prison.landlock.as_ref().err()),
    ] {
        match missing {
            Some(reason) => println!("absent {}: {reason}", wall.name()),
            None => walls.insert(wall),
        }
    }
    let (ours, theirs) = Channel::pair()?;
    let args = ["--self-test-jail", "--control-fd", "0"];
    let namespaces: Vec<_> = match &prison.void {
        Ok(void) => void.namespaces().collect(),
        Err(_) => Vec::new(),
    };
    let pidfd = if prison.void.is_ok() {
        start_as_init(&program, &args, theirs.as_fd(), None)?.pidfd
    } else {
        let stdin = Stdio::from(OwnedFd::from(theirs));
        let child = Command::new(program).args(args).stdin(stdin).spawn()?;
        pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?
    };
    let sentence = Sentence {
        jail: JailSpec {
            namespaces: (0..).map(FdIndex).take(namespaces.len()).collect(),
            user: prison.users.as_ref().ok().map(|range| range.first),
            landlock: prison.landlock.is_ok(),
        },
        walls,
        outside: rustix::process::getpid().as_raw_pid(),
    };
    ours.send(&encode(&sentence)?, &namespaces)?;
    let ended = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED)?;
    let status = ended.and_then(|ended| ended.exit_status());
    if status.is_none() {
        println!("BREACH the process inside did not end by itself");
    }
    Ok(status == Some(0))
}

/// The half inside.
pub fn inside(control_fd: i32) -> ExitCode {
    let tried = close_other_descriptors(control_fd)
        .map_err(Failure::from)
        .and_then(|()| serve(control_fd));
    match tried {
        Ok(0) => ExitCode::Ok,
        Ok(_) => ExitCode::Internal,
        Err(error) => {
            println!("BREACH the jail was not entered: {}", chain(error.as_ref()));
            ExitCode::Internal
        }
    }
}

/// Enters the jail and counts the breaches.
fn serve(control_fd: i32) -> Result<usize, Failure> {
    install_forbidden_call_handler()?;
    let channel = Channel::from_fd(inherited_fd(control_fd)?);
    let mut buffer = vec![0; forkd_vmm_proto::MAX_MESSAGE];
    let got = channel.recv(&mut buffer)?;
    let sentence: Sentence = decode(&buffer[..got.len])?;
    let before = rustix::process::getuid();
    enter(Cell {
        namespaces: got.fds,
        user: sentence.jail.user,
        landlock: sentence.jail.landlock,
    })?;
    let seen = attempts::Seen {
        walls: sentence.walls,
        outside: sentence.outside,
        user_before: before,
    };
    let breaches = attempts::facts(&seen) + attempts::attempts(&seen)?;
    Ok(breaches)
}
