//! Warm interpreters: resident processes that keep their state between calls.

mod call;
mod reseed;
mod running;
mod wire;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forkd_guest_proto::{
    AgentError, ErrorCode, EvalError, InterpInfo, InterpName, InterpStart, InterpState,
};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::error;
use crate::process::Processes;

pub use call::eval;
use running::Running;
use wire::Ask;

/// How many interpreters there may be.
const MAX_INTERPS: usize = 32;
/// How long starting and warming up may take.
const START_TIME: Duration = Duration::from_secs(300);
/// How long an interpreter may take over something that is not a call, on a host that is busy.
const CONTROL_TIME: Duration = Duration::from_secs(120);
/// The same for one that is in the middle of a call: the request is carried out when the call is
/// over, and no caller has to wait for that.
const CONTROL_TIME_IN_CALL: Duration = Duration::from_secs(1);

/// One interpreter, which outlives the processes that are it in turn.
pub struct Interp {
    name: String,
    spec: InterpStart,
    processes: Rc<Processes>,
    running: RefCell<Option<Rc<Running>>>,
    state: Cell<InterpState>,
    version: RefCell<String>,
    restarts: Cell<u64>,
    calls: Cell<u64>,
    warmup_error: RefCell<Option<EvalError>>,
    last_death: RefCell<Option<String>>,
    stopped: Cell<bool>,
    /// Held by the one call, start or stop that is under way.
    turn: Arc<Mutex<()>>,
}

/// All interpreters by name.
pub struct Interps {
    processes: Rc<Processes>,
    table: RefCell<BTreeMap<String, Rc<Interp>>>,
}

impl Interps {
    pub fn new(processes: Rc<Processes>) -> Self {
        Self {
            processes,
            table: RefCell::default(),
        }
    }

    /// Starts an interpreter and warms it up.
    pub async fn start(&self, spec: InterpStart) -> Result<InterpInfo, AgentError> {
        let name = spec.name.clone().unwrap_or_else(|| spec.language.clone());
        if name.is_empty() || name.len() > 64 {
            return Err(error::bad("the name of an interpreter has 1 to 64 bytes"));
        }
        let old = self.table.borrow().get(&name).cloned();
        if let Some(old) = old {
            if !spec.replace && old.spec.language == spec.language {
                let turn = old.take_turn().await;
                old.ensure_running(&turn).await?;
                return Ok(old.info());
            }
            old.stop().await;
        }
        let interp = self.insert(name, spec)?;
        let turn = interp.take_turn().await;
        interp.ensure_running(&turn).await?;
        Ok(interp.info())
    }

    fn insert(&self, name: String, spec: InterpStart) -> Result<Rc<Interp>, AgentError> {
        if self.table.borrow().len() >= MAX_INTERPS && !self.table.borrow().contains_key(&name) {
            return Err(AgentError::new(
                ErrorCode::Limit,
                format!("{MAX_INTERPS} interpreters exist already"),
            ));
        }
        let interp = Rc::new(Interp {
            name: name.clone(),
            spec,
            processes: Rc::clone(&self.processes),
            running: RefCell::default(),
            state: Cell::new(InterpState::Starting),
            version: RefCell::default(),
            restarts: Cell::new(0),
            calls: Cell::new(0),
            warmup_error: RefCell::default(),
            last_death: RefCell::default(),
            stopped: Cell::new(false),
            turn: Arc::default(),
        });
        self.table.borrow_mut().insert(name, Rc::clone(&interp));
        Ok(interp)
    }

    /// The interpreter of this name; one named after a language comes into being by being asked for.
    fn find(&self, name: &str) -> Result<Rc<Interp>, AgentError> {
        if let Some(interp) = self.table.borrow().get(name) {
            return Ok(Rc::clone(interp));
        }
        if !matches!(name, "python" | "node") {
            return Err(not_found(name));
        }
        self.insert(
            name.to_owned(),
            InterpStart {
                language: name.to_owned(),
                ..Default::default()
            },
        )
    }

    fn get(&self, name: &InterpName) -> Result<Rc<Interp>, AgentError> {
        self.table
            .borrow()
            .get(&name.name)
            .cloned()
            .ok_or_else(|| not_found(&name.name))
    }

    pub fn list(&self) -> Vec<InterpInfo> {
        self.table
            .borrow()
            .values()
            .map(|interp| interp.info())
            .collect()
    }

    /// Interrupts the call under way.
    pub async fn interrupt(&self, name: &InterpName) -> Result<(), AgentError> {
        if let Some(running) = self.get(name)?.running() {
            running.interrupt().await;
        }
        Ok(())
    }

    /// Ends the process, whatever it does, and warms up a new one.
    pub async fn restart(&self, name: &InterpName) -> Result<InterpInfo, AgentError> {
        let interp = self.get(name)?;
        if let Some(running) = interp.running() {
            running.kill();
            running.wait_for_death().await;
        }
        let turn = interp.take_turn().await;
        interp.ensure_running(&turn).await?;
        Ok(interp.info())
    }

    pub async fn stop(&self, name: &InterpName) -> Result<(), AgentError> {
        let interp = self.get(name)?;
        self.table.borrow_mut().remove(&name.name);
        interp.stop().await;
        Ok(())
    }

    /// Has every interpreter give memory back.
    pub async fn collect(&self, warnings: &mut Vec<String>) {
        self.tell_all(warnings, |id| Ask::Collect { id }).await;
    }

    async fn tell_all<'a>(&self, warnings: &mut Vec<String>, ask: impl Fn(u64) -> Ask<'a> + Copy) {
        let all: Vec<_> = self.table.borrow().values().cloned().collect();
        let mut asked = Vec::new();
        // All are asked before the first is waited for.
        for interp in all {
            let Some(running) = interp.running() else {
                continue;
            };
            if let Err(error) = interp.hand_over_seed(&running).await {
                warnings.push(error.message);
                continue;
            }
            asked.push((interp, running.ask(ask).await));
        }
        for (interp, answer) in asked {
            let Ok(answer) = answer else { continue };
            let in_call = interp.is_in_call();
            let limit = if in_call {
                CONTROL_TIME_IN_CALL
            } else {
                CONTROL_TIME
            };
            match tokio::time::timeout(limit, answer).await {
                Ok(Ok(answer)) => {
                    if let Some(error) = answer.error {
                        warnings.push(format!("interpreter {}: {}", interp.name, error.message));
                    }
                }
                Ok(Err(_)) => warnings.push(format!("interpreter {} died", interp.name)),
                Err(_) if in_call => {
                    warnings.push(format!("interpreter {} is in a call", interp.name));
                }
                Err(_) => warnings.push(format!("interpreter {} does not answer", interp.name)),
            }
        }
    }
}

fn not_found(name: &str) -> AgentError {
    AgentError::new(ErrorCode::NotFound, format!("no interpreter {name:?}"))
}

/// Proof that a turn was taken.
type Turn = OwnedMutexGuard<()>;

impl Interp {
    async fn take_turn(&self) -> Turn {
        Arc::clone(&self.turn).lock_owned().await
    }

    /// A call, a start or a stop is under way.
    fn is_in_call(&self) -> bool {
        self.turn.try_lock().is_err()
    }

    fn running(&self) -> Option<Rc<Running>> {
        self.running
            .borrow()
            .clone()
            .filter(|running| running.death().is_none())
    }

    fn info(&self) -> InterpInfo {
        InterpInfo {
            name: self.name.clone(),
            language: self.spec.language.clone(),
            version: self.version.borrow().clone(),
            pid: self.running().map_or(0, |running| running.pid),
            state: self.state.get(),
            restarts: self.restarts.get(),
            calls: self.calls.get(),
            warmup_error: self.warmup_error.borrow().clone(),
            last_death: self.last_death.borrow().clone(),
        }
    }

    async fn stop(&self) {
        self.stopped.set(true);
        if let Some(running) = self.running() {
            running.kill();
            running.wait_for_death().await;
        }
        let _turn = self.take_turn().await;
    }

    /// Makes sure that a warm process is there.
    async fn ensure_running(self: &Rc<Self>, _turn: &Turn) -> Result<Rc<Running>, AgentError> {
        if let Some(running) = self.running() {
            self.hand_over_seed(&running).await?;
            return Ok(running);
        }
        if self.stopped.get() {
            return Err(AgentError::new(
                ErrorCode::Gone,
                format!("interpreter {} was stopped", self.name),
            ));
        }
        self.state.set(InterpState::Starting);
        let limit = self
            .spec
            .timeout_ms
            .map_or(START_TIME, Duration::from_millis);
        let started = tokio::time::timeout(limit, self.start_process()).await;
        match started {
            Ok(Ok(running)) => {
                self.state.set(InterpState::Ready);
                self.replace_when_it_dies(&running);
                Ok(running)
            }
            Ok(Err(error)) => {
                self.state.set(InterpState::Dead);
                Err(error)
            }
            Err(_) => {
                self.state.set(InterpState::Dead);
                if let Some(running) = self.running() {
                    running.kill();
                }
                let message = format!("interpreter {} was not ready after {limit:?}", self.name);
                Err(AgentError::new(ErrorCode::Timeout, message))
            }
        }
    }

    async fn start_process(&self) -> Result<Rc<Running>, AgentError> {
        let running = Running::start(&self.processes, &self.spec)?;
        let hello = running.hello();
        if self
            .running
            .borrow_mut()
            .replace(Rc::clone(&running))
            .is_some()
        {
            self.restarts.set(self.restarts.get() + 1);
        }
        // What it says about itself when it cannot start is the best explanation there is.
        let complaint = running.stderr.log.follow(true, false);
        let Ok(hello) = hello.await else {
            let mut error = running.dead_error();
            running.stderr.log.ended().await;
            if let Some(crate::process::Read::Bytes { bytes, .. }) = complaint.read(2000) {
                error.message = format!(
                    "{}: {}",
                    error.message,
                    String::from_utf8_lossy(&bytes).trim()
                );
            }
            return Err(error);
        };
        *self.version.borrow_mut() = hello.version;
        let warmup = &self.spec.warmup;
        if !warmup.imports.is_empty() || !warmup.code.is_empty() {
            let ask = |id| Ask::Warmup {
                id,
                imports: &warmup.imports,
                code: &warmup.code,
            };
            let answer = running
                .ask(ask)
                .await?
                .await
                .map_err(|_| running.dead_error())?;
            *self.warmup_error.borrow_mut() = answer.error;
        }
        Ok(running)
    }

    /// Warms up the next one as soon as this one is gone, so that the next call finds it ready.
    fn replace_when_it_dies(self: &Rc<Self>, running: &Rc<Running>) {
        let (interp, running) = (Rc::clone(self), Rc::clone(running));
        tokio::task::spawn_local(async move {
            let death = running.wait_for_death().await;
            *interp.last_death.borrow_mut() = Some(death);
            interp.state.set(InterpState::Dead);
            if !interp.stopped.get() {
                let turn = interp.take_turn().await;
                // An interpreter that cannot start is started again by the next request for it.
                let _ = interp.ensure_running(&turn).await;
            }
        });
    }
}
