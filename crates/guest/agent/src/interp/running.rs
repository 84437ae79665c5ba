//! One interpreter process.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::rc::Rc;

use forkd_guest_proto::{AgentError, ErrorCode, ExecRequest, InterpStart};
use rustix::process::{Pid, Signal};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, oneshot};

use super::wire::{self, Answer, Ask};
use crate::error;
use crate::process::{Gone, Log, Processes, pump, spawn};
use crate::sys;

/// The bytes that are kept of output between calls.
const KEEP: usize = 64 * 1024;

const PYTHON: &str = include_str!("python.py");
const NODE: &str = include_str!("node.js");
const NODE_DIALECT: &str = include_str!("dialect.js");
const NODE_RESEED: &str = include_str!("reseed.js");
/// Reseeds OpenSSL inside Node.js; `build.rs` compiles it.
const NODE_ADDON: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/reseed.node"));

/// One interpreter process.
pub struct Running {
    pub pid: u32,
    socket: Rc<AsyncFd<OwnedFd>>,
    pub stdout: Output,
    pub stderr: Output,
    next: Cell<u64>,
    call: Cell<u64>,
    /// The runner cannot interrupt itself.
    needs_signal: bool,
    waiting: RefCell<HashMap<u64, oneshot::Sender<Answer>>>,
    death: RefCell<Option<String>>,
    died: Notify,
    sending: tokio::sync::Mutex<()>,
    /// No code of the user runs before the next call.
    pub alone: Cell<bool>,
    /// A seed that the interpreter gets before its next call.
    pub seed: RefCell<Option<String>>,
}

/// One output of the process.
pub struct Output {
    fd: Rc<AsyncFd<OwnedFd>>,
    pub log: Rc<Log>,
}

impl Output {
    /// How many bytes the log will hold when all that is printed by now is in it.
    pub fn printed(&self) -> u64 {
        self.log.total() + rustix::io::ioctl_fionread(self.fd.get_ref()).unwrap_or(0)
    }
}

impl Running {
    /// Starts the process and the tasks that listen to it.
    pub fn start(processes: &Processes, spec: &InterpStart) -> Result<Rc<Self>, AgentError> {
        let (near, far) =
            UnixStream::pair().map_err(|error| error::io("cannot make a socket", &error))?;
        let failed = |error: io::Error| error::io("cannot set up an interpreter", &error);
        near.set_nonblocking(true).map_err(failed)?;
        let request = ExecRequest {
            argv: command_line(spec)?,
            env: environment(spec),
            cwd: spec.cwd.clone(),
            user: spec.user.clone(),
            ..Default::default()
        };
        let spawned = spawn::spawn_with(
            &processes.reaper,
            processes.cgroup()?,
            &request,
            Some(far.into()),
        )?;
        let output = |fd: AsyncFd<OwnedFd>| Output {
            fd: Rc::new(fd),
            log: Rc::new(Log::new(KEEP)),
        };
        let stderr = spawned
            .stderr
            .ok_or_else(|| error::bad("an interpreter has no terminal"))?;
        let running = Rc::new(Self {
            pid: spawned.child.pid,
            socket: Rc::new(sys::watched(near.into()).map_err(failed)?),
            stdout: output(spawned.stdout),
            stderr: output(stderr),
            next: Cell::new(1),
            call: Cell::new(0),
            needs_signal: spec.language != "python",
            waiting: RefCell::default(),
            death: RefCell::default(),
            died: Notify::new(),
            sending: tokio::sync::Mutex::new(()),
            alone: Cell::new(false),
            seed: RefCell::default(),
        });
        let gone = Rc::new(Gone::default());
        for output in [&running.stdout, &running.stderr] {
            let (fd, log) = (Rc::clone(&output.fd), Rc::clone(&output.log));
            tokio::task::spawn_local(pump::pump(fd, log, Rc::clone(&gone), |_| {}));
        }
        tokio::task::spawn_local(listen(Rc::clone(&running)));
        let watched = Rc::clone(&running);
        tokio::task::spawn_local(async move {
            let status = spawned.child.ended.await.map(|reaped| reaped.status);
            gone.set();
            watched.die(match status {
                Ok(forkd_guest_proto::ExitStatus::Code(code)) => format!("it returned {code}"),
                Ok(forkd_guest_proto::ExitStatus::Signal(signal)) => {
                    format!("signal {signal} ended it")
                }
                Err(_) => "it is gone".to_owned(),
            });
        });
        Ok(running)
    }

    /// Why it ended, if it did.
    pub fn death(&self) -> Option<String> {
        self.death.borrow().clone()
    }

    /// Waits for its end.
    pub async fn wait_for_death(&self) -> String {
        loop {
            if let Some(death) = self.death() {
                return death;
            }
            self.died.notified().await;
        }
    }

    fn die(&self, why: String) {
        self.death.borrow_mut().get_or_insert(why);
        self.waiting.borrow_mut().clear();
        self.died.notify_waiters();
    }

    /// The hello, which comes unasked.
    pub fn hello(&self) -> oneshot::Receiver<Answer> {
        let (sender, receiver) = oneshot::channel();
        self.waiting.borrow_mut().insert(0, sender);
        receiver
    }

    /// Asks something; the answer comes later.
    pub async fn ask<'a>(
        &self,
        ask: impl FnOnce(u64) -> Ask<'a>,
    ) -> Result<oneshot::Receiver<Answer>, AgentError> {
        let id = self.next.get();
        self.next.set(id + 1);
        let (sender, receiver) = oneshot::channel();
        if self.death.borrow().is_none() {
            self.waiting.borrow_mut().insert(id, sender);
        }
        let turn = self.sending.lock().await;
        let sent = wire::send(&self.socket, &ask(id)).await;
        drop(turn);
        sent.map_err(|_| self.dead_error())?;
        Ok(receiver)
    }

    /// Asks for a call, which is what an interrupt then means.
    pub async fn ask_call<'a>(
        &self,
        ask: impl FnOnce(u64) -> Ask<'a>,
    ) -> Result<oneshot::Receiver<Answer>, AgentError> {
        self.call.set(self.next.get());
        self.ask(ask).await
    }

    /// The error of calls that died with the process.
    pub fn dead_error(&self) -> AgentError {
        let why = self
            .death()
            .unwrap_or_else(|| "it closed its socket".to_owned());
        AgentError::new(
            ErrorCode::InterpDied,
            format!("the interpreter died: {why}"),
        )
    }

    /// Interrupts the last call that was asked for. A signal alone could come before the call begins, and a
    /// runner that is in the middle of a loop may not read messages.
    pub async fn interrupt(&self) {
        let call = self.call.get();
        let _ = self.ask(|id| Ask::Interrupt { id, call }).await;
        if self.needs_signal {
            self.signal(Signal::INT);
        }
    }

    /// Kills the interpreter.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        if self.death.borrow().is_none()
            && let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw)
        {
            let _ = rustix::process::kill_process_group(pid, signal);
        }
    }
}

async fn listen(running: Rc<Running>) {
    while let Ok(Some(answer)) = wire::receive(&running.socket).await {
        if let Some(alone) = answer.alone {
            running.alone.set(alone);
        }
        if let Some(sender) = running.waiting.borrow_mut().remove(&answer.id) {
            let _ = sender.send(answer);
        }
    }
    // Without its socket it is of no use, whether or not the process is still there.
    running.kill();
}

fn command_line(spec: &InterpStart) -> Result<Vec<String>, AgentError> {
    let (program, flags, name, source): (_, &[&str], _, _) = match spec.language.as_str() {
        "python" => ("python3", &["-X", "utf8"], "python.py", PYTHON),
        "node" => {
            place("reseed.node", NODE_ADDON)?;
            place("reseed.js", NODE_RESEED.as_bytes())?;
            place("dialect.js", NODE_DIALECT.as_bytes())?;
            ("node", &["--expose-gc"], "node.js", NODE)
        }
        other => {
            let message = format!("no interpreter for {other:?}");
            return Err(AgentError::new(ErrorCode::Unsupported, message));
        }
    };
    let program = spec.program.as_deref().unwrap_or(program);
    let path = place(name, source.as_bytes())?.display().to_string();
    let words = [program]
        .into_iter()
        .chain(flags.iter().copied())
        .map(ToOwned::to_owned);
    Ok(words.chain([path]).collect())
}

/// Writes a file of a runner where the interpreter can read it, whichever user the interpreter runs as.
fn place(name: &str, content: &[u8]) -> Result<PathBuf, AgentError> {
    let directory = crate::agent::run_directory();
    let path = directory.join(name);
    if fs::read(&path).is_ok_and(|old| old == content) {
        return Ok(path);
    }
    let written = fs::create_dir_all(&directory)
        .and_then(|()| fs::write(&path, content))
        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o644)));
    written.map_err(|error| error::at("write", &path, &error))?;
    Ok(path)
}

fn environment(spec: &InterpStart) -> Vec<(String, Option<String>)> {
    // Plots have no screen to go to.
    let own = [("MPLBACKEND".to_owned(), Some("Agg".to_owned()))];
    own.into_iter().chain(spec.env.iter().cloned()).collect()
}
