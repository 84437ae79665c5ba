//! What all connections share.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Instant;

use forkd_guest_proto::{AgentError, ErrorCode, Pong, ShutdownRequest};

use crate::interp::Interps;
use crate::process::{Processes, Reaper};

/// What the agent is to the machine it runs in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// PID 1 of a sandbox.
    Guest,
    /// PID 1 of a machine that hosts sandboxes.
    Machine,
    /// An ordinary process.
    Process,
}

impl Role {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest",
            Self::Machine => "machine",
            Self::Process => "process",
        }
    }
}

/// What all connections share.
pub struct Agent {
    pub role: Role,
    pub started: Instant,
    pub generation: RefCell<String>,
    pub reaper: Rc<Reaper>,
    pub processes: Rc<Processes>,
    pub interps: Interps,
    /// Carried out once the answer is on its way.
    pub shutdown: Cell<Option<ShutdownRequest>>,
}

impl Agent {
    pub fn new(role: Role, cgroup: Option<std::os::fd::OwnedFd>) -> Self {
        let reaper = Rc::new(Reaper::default());
        let processes = Rc::new(Processes::new(Rc::clone(&reaper), cgroup));
        Self {
            role,
            started: Instant::now(),
            generation: RefCell::default(),
            interps: Interps::new(Rc::clone(&processes)),
            processes,
            reaper,
            shutdown: Cell::new(None),
        }
    }

    /// An ordinary process leaves the machine it runs on as it is.
    pub fn may_change_machine(&self) -> Result<(), AgentError> {
        if self.role == Role::Process {
            let message = "this agent is an ordinary process and does not change its machine";
            return Err(AgentError::new(ErrorCode::Permission, message));
        }
        Ok(())
    }

    pub fn pong(&self) -> Pong {
        let uname = rustix::system::uname();
        Pong {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            generation: self.generation.borrow().clone(),
            hostname: uname.nodename().to_string_lossy().into_owned(),
            pid: std::process::id(),
            role: self.role.name().to_owned(),
            kernel: uname.release().to_string_lossy().into_owned(),
        }
    }
}

/// Where the agent keeps what must not outlive the guest.
pub fn run_directory() -> std::path::PathBuf {
    std::env::var_os("FORKD_AGENT_RUN_DIR").map_or_else(|| "/run/forkd".into(), Into::into)
}
