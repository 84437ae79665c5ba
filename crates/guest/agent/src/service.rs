//! Services: programs that the agent starts, waits for until they are ready, and starts again when they end.
//!
//! ```text
//!   start ─► Starting ──ready──► Ready ──ended──► Restarting ──► Ready …
//!               │ ended, late                │ policy
//!               ▼                            ▼
//!             error                        Ended
//! ```
//!
//! A service is a process of the agent like any other: its output is kept, and a freeze covers it. The list of services
//! is in the agent's memory, so a child goes on supervising what its parent started.

mod readiness;
mod settle;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use forkd_guest_proto::{
    AgentError, ErrorCode, ExecRequest, ExitStatus, ProcessId, Restart, ServiceInfo, ServiceStart,
    ServiceState,
};

use crate::error;
use crate::process::{Process, Processes, Read};

pub use settle::settle;

/// Services of a guest.
const MAX_SERVICES: usize = 64;
/// The time to become ready, unless the request says otherwise.
const READY_TIME: Duration = Duration::from_secs(120);
/// The first and the longest time between the end of a service and its next start.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// A service that ran for this long begins with the first pause again.
const LONG_RUN: Duration = Duration::from_secs(60);
/// The end of the output that an error carries.
const TAIL: usize = 2000;
/// The bytes of each output of a service that are kept.
const KEEP: u32 = 256 * 1024;

/// The services of the guest.
pub struct Services {
    processes: Rc<Processes>,
    all: RefCell<BTreeMap<String, Rc<Service>>>,
}

/// A service and how often it was started.
struct Service {
    start: ServiceStart,
    state: Cell<ServiceState>,
    process: Cell<ProcessId>,
    restarts: Cell<u32>,
    last_end: Cell<Option<ExitStatus>>,
}

impl Services {
    pub fn new(processes: Rc<Processes>) -> Self {
        Self {
            processes,
            all: RefCell::default(),
        }
    }

    pub fn list(&self) -> Vec<ServiceInfo> {
        self.all.borrow().values().map(|one| one.info()).collect()
    }

    /// Starts a service and waits until it is ready. A service that does not become ready is ended and forgotten.
    pub async fn start(&self, start: ServiceStart) -> Result<ServiceInfo, AgentError> {
        let time = start.timeout_ms.map_or(READY_TIME, Duration::from_millis);
        let service = self.add(start)?;
        let entry = Entry {
            services: self,
            service: &service,
            kept: Cell::new(false),
        };
        let process = self.processes.start(&service.command())?;
        service.process.set(process.id);
        let ready = readiness::wait(&self.processes, &service.start, &process);
        let name = &service.start.name;
        let problem = tokio::select! {
            biased;
            result = process.wait() => format!("service {name} ended before it was ready, with {:?}", result.status),
            () = ready => String::new(),
            missing = expired(time, &self.processes, &service.start, &process) => missing,
        };
        if !problem.is_empty() {
            let printed = tail(&process);
            let _ = self.processes.forget(process.id);
            let message = match printed.trim() {
                "" => problem,
                printed => format!("{problem}; the end of its output: {printed}"),
            };
            return Err(AgentError::new(ErrorCode::ExecFailed, message));
        }
        entry.kept.set(true);
        service.state.set(ServiceState::Ready);
        let (processes, supervised) = (Rc::clone(&self.processes), Rc::clone(&service));
        tokio::task::spawn_local(async move { supervised.supervise(&processes, process).await });
        Ok(service.info())
    }

    fn add(&self, start: ServiceStart) -> Result<Rc<Service>, AgentError> {
        let name = start.name.clone();
        if name.is_empty() || name.len() > 64 || name.chars().any(char::is_control) {
            return Err(error::bad("a service has a name of 1 to 64 characters"));
        }
        let mut all = self.all.borrow_mut();
        if all.contains_key(&name) {
            let message = format!("there is a service {name} already");
            return Err(AgentError::new(ErrorCode::Exists, message));
        }
        if all.len() >= MAX_SERVICES {
            let message = format!("there are {MAX_SERVICES} services already");
            return Err(AgentError::new(ErrorCode::Limit, message));
        }
        let service = Rc::new(Service {
            start,
            state: Cell::new(ServiceState::Starting),
            process: Cell::new(0),
            restarts: Cell::new(0),
            last_end: Cell::new(None),
        });
        all.insert(name, Rc::clone(&service));
        Ok(service)
    }
}

/// Removes a service that did not become ready, also if the request was cancelled.
struct Entry<'a> {
    services: &'a Services,
    service: &'a Service,
    kept: Cell<bool>,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        if self.kept.get() {
            return;
        }
        let _ = self.services.processes.forget(self.service.process.get());
        let name = &self.service.start.name;
        self.services.all.borrow_mut().remove(name);
    }
}

/// Waits until the time is over, and says what is missing then.
async fn expired(
    time: Duration,
    processes: &Rc<Processes>,
    start: &ServiceStart,
    process: &Rc<Process>,
) -> String {
    tokio::time::sleep(time).await;
    let missing = readiness::missing(processes, start, process).await;
    format!(
        "service {} was not ready after {} s: {missing}",
        start.name,
        time.as_secs()
    )
}

/// The end of what a process printed, errors last.
fn tail(process: &Process) -> String {
    let mut text = String::new();
    for log in [Some(&process.stdout), process.stderr.as_ref()]
        .into_iter()
        .flatten()
    {
        let since = log.total().saturating_sub(TAIL as u64);
        if let Some(Read::Bytes { bytes, .. }) = log.follow_since(since, false).read(TAIL) {
            text.push_str(&String::from_utf8_lossy(&bytes));
        }
    }
    text
}

impl Service {
    fn info(&self) -> ServiceInfo {
        ServiceInfo {
            name: self.start.name.clone(),
            state: self.state.get(),
            process: self.process.get(),
            restarts: self.restarts.get(),
            last_end: self.last_end.get(),
        }
    }

    fn command(&self) -> ExecRequest {
        ExecRequest {
            argv: self.start.argv.clone(),
            env: self.start.env.clone(),
            cwd: self.start.cwd.clone(),
            user: self.start.user.clone(),
            tag: Some(format!("service:{}", self.start.name)),
            background: true,
            keep_output: Some(KEEP),
            ..ExecRequest::default()
        }
    }

    /// Starts the service again whenever it ends, as its policy says.
    async fn supervise(&self, processes: &Rc<Processes>, first: Rc<Process>) {
        let mut process = first;
        let mut pause = PAUSE.0;
        loop {
            let began = Instant::now();
            let result = process.wait().await;
            self.last_end.set(Some(result.status));
            let again = match self.start.restart {
                Restart::Never => false,
                Restart::OnFailure => !result.status.success(),
                Restart::Always => true,
            };
            if !again {
                self.state.set(ServiceState::Ended);
                return;
            }
            self.state.set(ServiceState::Restarting);
            if began.elapsed() >= LONG_RUN {
                pause = PAUSE.0;
            }
            process = loop {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE.1);
                // Not while processes are frozen, nor without memory for another one: both pass.
                if let Ok(process) = processes.start(&self.command()) {
                    break process;
                }
            };
            self.process.set(process.id);
            self.restarts.set(self.restarts.get().saturating_add(1));
            let ended = process.wait();
            tokio::select! {
                biased;
                _ = ended => {}
                () = readiness::wait(processes, &self.start, &process) => self.state.set(ServiceState::Ready),
            }
        }
    }
}
