//! The processes that the agent started.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use forkd_guest_proto::{
    AgentError, ErrorCode, ExecRequest, ExecResult, OutputPosition, ProcessId, ProcessInfo,
    ProcessState, SignalRequest, Started,
};
use rustix::process::{Pid, Signal};
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use super::log::Log;
use super::reaper::Reaper;
use super::{spawn, supervise};
use crate::error;
use crate::user_group::UserGroup;

/// Processes that may run at once by requests.
const MAX_RUNNING: usize = 2048;
/// Ended processes that are remembered.
const MAX_ENDED: usize = 64;
/// The bytes of each output that are kept unless the request says otherwise.
const KEEP: u32 = 64 * 1024;
/// The most that a request can have kept.
const MAX_KEEP: u32 = 8 * 1024 * 1024;

/// A process that the agent has started.
pub struct Process {
    pub id: ProcessId,
    pub pid: u32,
    argv: Vec<String>,
    tag: Option<String>,
    user: Option<String>,
    cwd: String,
    started_unix_ms: u64,
    pub pty: bool,
    background: bool,
    pub stdout: Rc<Log>,
    pub stderr: Option<Rc<Log>>,
    stdin: RefCell<Option<Rc<AsyncFd<OwnedFd>>>>,
    result: Cell<Option<ExecResult>>,
    /// The process ID may belong to another process already.
    reaped: Cell<bool>,
    ended: Notify,
    /// No request will ask for the result any more.
    pub forgotten: Cell<bool>,
}

/// The processes that the agent started.
pub struct Processes {
    pub reaper: Rc<Reaper>,
    group: Option<Rc<UserGroup>>,
    next: Cell<ProcessId>,
    table: RefCell<BTreeMap<ProcessId, Rc<Process>>>,
}

impl Processes {
    pub fn new(reaper: Rc<Reaper>, group: Option<Rc<UserGroup>>) -> Self {
        Self {
            reaper,
            group,
            next: Cell::new(1),
            table: RefCell::default(),
        }
    }

    /// The file through which a new process joins the group of user processes, if there is a group. A process that
    /// joined a frozen group would never run its program, and the agent would wait for that for ever.
    pub fn cgroup(&self) -> Result<Option<BorrowedFd<'_>>, AgentError> {
        match &self.group {
            Some(group) if group.is_frozen() => Err(AgentError::new(
                ErrorCode::Busy,
                "user processes are frozen; no other can be started before they are thawed",
            )),
            group => Ok(group.as_ref().map(|group| group.procs())),
        }
    }

    /// Starts a process and the task that looks after it.
    pub fn start(self: &Rc<Self>, request: &ExecRequest) -> Result<Rc<Process>, AgentError> {
        self.make_room()?;
        let spawned = spawn::spawn(&self.reaper, self.cgroup()?, request)?;
        let keep = request.keep_output.unwrap_or(KEEP).min(MAX_KEEP) as usize;
        let id = self.next.get();
        self.next.set(id + 1);
        let process = Rc::new(Process {
            id,
            pid: spawned.child.pid,
            argv: spawned.argv,
            tag: request.tag.clone(),
            user: request.user.clone(),
            cwd: spawned.cwd,
            started_unix_ms: unix_ms(),
            pty: spawned.pty,
            background: request.background,
            stdout: Rc::new(Log::new(keep)),
            stderr: spawned.stderr.is_some().then(|| Rc::new(Log::new(keep))),
            stdin: RefCell::new(spawned.stdin.map(Rc::new)),
            result: Cell::new(None),
            reaped: Cell::new(false),
            ended: Notify::new(),
            forgotten: Cell::new(false),
        });
        self.table.borrow_mut().insert(id, Rc::clone(&process));
        let fds = supervise::Outputs {
            stdout: spawned.stdout,
            stderr: spawned.stderr,
        };
        let limits = supervise::Limits::of(request);
        let (table, supervised) = (Rc::clone(self), Rc::clone(&process));
        tokio::task::spawn_local(async move {
            let result = supervise::supervise(&supervised, spawned.child.ended, fds, limits).await;
            supervised.finish(result);
            if supervised.forgotten.get() {
                table.table.borrow_mut().remove(&supervised.id);
            }
        });
        Ok(process)
    }

    fn make_room(&self) -> Result<(), AgentError> {
        let mut table = self.table.borrow_mut();
        let ended: Vec<_> = table
            .values()
            .filter(|p| p.result().is_some())
            .map(|p| p.id)
            .collect();
        if table.len() - ended.len() >= MAX_RUNNING {
            return Err(AgentError::new(
                ErrorCode::Limit,
                format!("{MAX_RUNNING} processes run already"),
            ));
        }
        for id in ended.iter().take(ended.len().saturating_sub(MAX_ENDED)) {
            table.remove(id);
        }
        Ok(())
    }

    pub fn get(&self, id: ProcessId) -> Result<Rc<Process>, AgentError> {
        let found = self.table.borrow().get(&id).cloned();
        found.ok_or_else(|| AgentError::new(ErrorCode::NotFound, format!("no process {id}")))
    }

    pub fn list(&self) -> Vec<ProcessInfo> {
        self.table
            .borrow()
            .values()
            .map(|process| process.info())
            .collect()
    }

    pub fn signal(&self, request: &SignalRequest) -> Result<(), AgentError> {
        self.get(request.process)?
            .signal(request.signal, request.group)
    }

    pub fn resize(&self, id: ProcessId, rows: u16, cols: u16) -> Result<(), AgentError> {
        self.get(id)?.resize(rows, cols)
    }

    pub fn forget(&self, id: ProcessId) -> Result<(), AgentError> {
        let process = self.get(id)?;
        process.forgotten.set(true);
        if process.result().is_some() {
            self.table.borrow_mut().remove(&id);
            return Ok(());
        }
        process.signal(libc::SIGKILL, true)
    }
}

impl Process {
    pub fn started(&self) -> Started {
        Started {
            process: self.id,
            pid: self.pid,
            at: OutputPosition::default(),
        }
    }

    pub fn result(&self) -> Option<ExecResult> {
        self.result.get()
    }

    /// Waits for the end.
    pub async fn wait(&self) -> ExecResult {
        loop {
            if let Some(result) = self.result.get() {
                return result;
            }
            self.ended.notified().await;
        }
    }

    /// The kernel's number is free for others from now on.
    pub fn set_reaped(&self) {
        self.reaped.set(true);
    }

    fn finish(&self, result: ExecResult) {
        self.result.set(Some(result));
        self.stdin.borrow_mut().take();
        self.ended.notify_waiters();
    }

    /// Sends a signal.
    pub fn signal(&self, number: i32, group: bool) -> Result<(), AgentError> {
        let gone = || AgentError::new(ErrorCode::Gone, format!("process {} has ended", self.id));
        if self.reaped.get() {
            return Err(gone());
        }
        let signal = Signal::from_named_raw(number)
            .ok_or_else(|| error::bad(format!("{number} is not a signal")))?;
        let pid = i32::try_from(self.pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(gone)?;
        let sent = if group {
            rustix::process::kill_process_group(pid, signal)
        } else {
            rustix::process::kill_process(pid, signal)
        };
        sent.map_err(|errno| {
            error::io(
                format_args!("cannot signal process {}", self.id),
                &errno.into(),
            )
        })
    }

    /// Tells the terminal its size.
    pub fn resize(&self, rows: u16, cols: u16) -> Result<(), AgentError> {
        let terminal = self.stdin.borrow().clone().filter(|_| self.pty);
        let Some(terminal) = terminal else {
            return Err(error::bad(format!("process {} has no terminal", self.id)));
        };
        spawn::set_size(terminal.get_ref().as_fd(), rows, cols)
            .map_err(|error| error::io("cannot set the size of the terminal", &error))
    }

    /// The way to its standard input, while that is open.
    pub fn stdin(&self) -> Option<Rc<AsyncFd<OwnedFd>>> {
        self.stdin.borrow().clone()
    }

    /// No more input comes.
    pub fn close_stdin(&self) {
        self.stdin.borrow_mut().take();
    }

    fn info(&self) -> ProcessInfo {
        ProcessInfo {
            process: self.id,
            pid: self.pid,
            argv: shortened(&self.argv),
            tag: self.tag.clone(),
            user: self.user.clone(),
            cwd: self.cwd.clone(),
            started_unix_ms: self.started_unix_ms,
            pty: self.pty,
            background: self.background,
            state: self
                .result()
                .map_or(ProcessState::Running, ProcessState::Ended),
            output_bytes: self.stdout.total() + self.stderr.as_ref().map_or(0, |log| log.total()),
        }
    }
}

/// Enough of a command line to know it by; a list of a thousand long ones must fit into a frame.
fn shortened(argv: &[String]) -> Vec<String> {
    let mut left = 256usize;
    let mut short = Vec::new();
    for argument in argv {
        if left == 0 {
            short.push("…".to_owned());
            break;
        }
        let kept: String = argument.chars().take(left).collect();
        left = left.saturating_sub(kept.len());
        short.push(kept);
    }
    short
}

fn unix_ms() -> u64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
