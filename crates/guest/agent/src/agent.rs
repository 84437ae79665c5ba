//! The state that all connections share.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkd_guest_proto::{
    AgentError, ErrorCode, FreezeReport, FreezeRequest, Pong, ShutdownRequest, ThawReport,
};

use crate::interp::Interps;
use crate::process::{Processes, Reaper};
use crate::service::Services;
use crate::user_group::UserGroup;

/// How long freezing may take unless the request says otherwise.
const FREEZE_TIME: Duration = Duration::from_secs(2);

/// The role of the agent in the machine it runs in.
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

/// The state that all connections share.
pub struct Agent {
    pub role: Role,
    pub started: Instant,
    pub generation: RefCell<String>,
    pub reaper: Rc<Reaper>,
    pub processes: Rc<Processes>,
    pub interps: Interps,
    pub services: Services,
    group: Option<Rc<UserGroup>>,
    /// Carried out once the answer is on its way.
    pub shutdown: Cell<Option<ShutdownRequest>>,
}

impl Agent {
    pub fn new(role: Role, group: Option<UserGroup>) -> Self {
        let reaper = Rc::new(Reaper::default());
        let group = group.map(Rc::new);
        let processes = Rc::new(Processes::new(Rc::clone(&reaper), group.clone()));
        Self {
            role,
            started: Instant::now(),
            generation: RefCell::default(),
            interps: Interps::new(Rc::clone(&processes)),
            services: Services::new(Rc::clone(&processes)),
            processes,
            reaper,
            group,
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

    /// Freezes user processes.
    pub async fn freeze(&self, request: FreezeRequest) -> Result<FreezeReport, AgentError> {
        let Some(group) = &self.group else {
            let message = "user processes have no control group that could be frozen";
            return Err(AgentError::new(ErrorCode::Unsupported, message));
        };
        let limit = request
            .timeout_ms
            .map_or(FREEZE_TIME, Duration::from_millis);
        group.freeze(limit).await
    }

    /// Ends every user process.
    pub async fn kill_all(&self) -> Result<(), AgentError> {
        match &self.group {
            Some(group) => group.kill_all().await,
            None => Err(AgentError::new(
                ErrorCode::Unsupported,
                "user processes have no control group that could be ended",
            )),
        }
    }

    /// Lets user processes run; returns whether they were frozen.
    pub fn thaw(&self) -> Result<ThawReport, AgentError> {
        let was_frozen = match &self.group {
            Some(group) => group.thaw()?,
            None => false,
        };
        Ok(ThawReport { was_frozen })
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
            frozen: self.group.as_ref().is_some_and(|group| group.is_frozen()),
            kernel: uname.release().to_string_lossy().into_owned(),
        }
    }
}

/// Where the agent keeps what must not outlive the guest.
pub fn run_directory() -> std::path::PathBuf {
    std::env::var_os("FORKD_AGENT_RUN_DIR").map_or_else(|| "/run/forkd".into(), Into::into)
}
