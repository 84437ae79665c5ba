//! The control loop: commands in, replies and events out.
//!
//! One thread waits for commands, for notices of the machine and for the memory writer. A cut or checkpoint is
//! answered when its writer has finished; commands that need the writer wait in order behind it, all others
//! are carried out meanwhile. The loop ends with the machine or when the control socket closes.

use std::collections::VecDeque;
use std::io::{Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use forkd_sys::jail::{Cell, enter};
use forkd_sys::{Channel, ChannelError, Pagemap, PagemapError};
use forkd_types::Engine;
use forkd_vmm_proto::{
    Capabilities, Command, Counters, Event, ExitCode, FromVmm, JailSpec, MAX_MESSAGE,
    MAX_NAMESPACES, PROTOCOL_VERSION, PrepareSpec, Reply, Request, ResponseTo, Status, StopCause,
    VmmError, VmmErrorCode, VmmPhase, WireError, decode, encode,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

use super::error::{Code, chain, wire_error};
use super::seccomp;
use crate::kvm::Hypervisor;
use crate::machine::{
    CheckpointDone, CheckpointInProgress, CutInProgress, DeviceSetError, FdError, Fds, Machine,
    Notice, Notices, ThreadStart,
};

/// Why the loop ended without the machine having ended.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The control socket failed.
    #[error("the control socket failed")]
    Channel(#[source] ChannelError),
    /// A message could not be made.
    #[error("cannot make a message")]
    Wire(#[from] WireError),
    /// The kernel refused to wait.
    #[error("cannot wait for orders")]
    Poll(#[source] std::io::Error),
}

type Answer = Result<Reply, VmmError>;

/// The most commands that wait for a cut or checkpoint to be written.
const MAX_WAITING: usize = 64;

/// The operation whose memory is being written.
enum Writing {
    Cut(Box<CutInProgress>),
    Checkpoint(Box<CheckpointInProgress>),
}

impl Writing {
    /// Readable once the writer is done; `None` if there is none to wait for.
    fn writer(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Cut(cut) => cut.writer(),
            Self::Checkpoint(checkpoint) => checkpoint.writer(),
        }
    }
}

/// A command that waits for its turn.
type Later = (u64, Command, Vec<OwnedFd>);

/// One connection and the machine behind it.
pub struct Session {
    channel: Channel,
    notices: Arc<Notices>,
    seccomp: bool,
    greeted: bool,
    machine: Option<Machine>,
    writing: Option<(u64, Writing)>,
    later: VecDeque<Later>,
    agent_ready: bool,
}

enum Next {
    Go,
    End(StopCause),
}

impl Session {
    /// A session without a machine. With `seccomp` every thread is restricted once it is set up.
    pub fn new(channel: Channel, seccomp: bool) -> std::io::Result<Self> {
        Ok(Self {
            channel,
            notices: Notices::new()?,
            seccomp,
            greeted: false,
            machine: None,
            writing: None,
            later: VecDeque::new(),
            agent_ready: false,
        })
    }

    /// Runs until the machine ends or the other side goes away.
    pub fn run(mut self) -> Result<ExitCode, SessionError> {
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            let (order, news, written) = self.wait()?;
            if news && let Next::End(cause) = self.tell_news()? {
                return self.end(cause);
            }
            if written {
                self.finish_writing()?;
                self.take_waiting()?;
            }
            if order {
                match self.take_order(&mut buffer) {
                    Ok(Next::Go) => {}
                    Ok(Next::End(cause)) => return self.end(cause),
                    Err(SessionError::Channel(ChannelError::Closed)) => {
                        tracing::warn!("the control socket is closed");
                        return Ok(ExitCode::ControlLost);
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }

    /// Waits; returns whether there is a command, a notice, or a finished writer.
    fn wait(&self) -> Result<(bool, bool, bool), SessionError> {
        let mut fds = vec![
            PollFd::new(&self.channel, PollFlags::IN),
            PollFd::new(&self.notices, PollFlags::IN),
        ];
        let writer = self.writing.as_ref().map(|(_, writing)| writing.writer());
        if let Some(Some(writer)) = &writer {
            fds.push(PollFd::new(writer, PollFlags::IN));
        }
        // There is no writer to wait for: everything is written.
        let done = writer.is_some_and(|writer| writer.is_none());
        let now = Timespec::default();
        loop {
            match poll(&mut fds, done.then_some(&now)) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(SessionError::Poll(errno.into())),
            }
        }
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let mut next = || ready.next().unwrap_or(false);
        Ok((next(), next(), done || next()))
    }

    fn send(&self, message: &FromVmm, fds: &[BorrowedFd<'_>]) -> Result<(), SessionError> {
        self.channel
            .send(&encode(message)?, fds)
            .map_err(SessionError::Channel)
    }

    fn event(&self, event: Event) -> Result<(), SessionError> {
        self.send(&FromVmm::Event(event), &[])
    }

    fn answer(&self, seq: u64, result: Answer) -> Result<(), SessionError> {
        self.send(&FromVmm::Response(ResponseTo { seq, result }), &[])
    }

    fn end(self, cause: StopCause) -> Result<ExitCode, SessionError> {
        if let Some(machine) = &self.machine {
            machine.devices().flush_console();
        }
        tracing::info!(?cause, "the machine ends");
        // The socket may be closed; the exit status has the same information.
        let _ = self.event(Event::Stopped { cause });
        Ok(cause.into())
    }

    fn tell_news(&mut self) -> Result<Next, SessionError> {
        for notice in self.notices.take() {
            match notice {
                Notice::AgentReady => {
                    self.agent_ready = true;
                    self.event(Event::AgentReady)?;
                }
                Notice::VsockConnect { port, stream } => {
                    let event = FromVmm::Event(Event::VsockConnect { port });
                    self.send(&event, &[stream.as_fd()])?;
                }
                Notice::DeviceFailed { slot, reason } => self.event(Event::DeviceFailed {
                    device: slot,
                    reason,
                })?,
                Notice::Stopped(cause) => return Ok(Next::End(cause)),
            }
        }
        Ok(Next::Go)
    }

    fn finish_writing(&mut self) -> Result<(), SessionError> {
        let (Some((seq, writing)), Some(machine)) = (self.writing.take(), &mut self.machine) else {
            return Ok(());
        };
        let result = match writing {
            Writing::Cut(cut) => {
                let stays_paused = cut.stays_paused();
                let result = machine.finish_cut(*cut).map(Reply::Cut);
                // A command may have resumed it meanwhile.
                if result.is_err()
                    && stays_paused
                    && machine.phase() == VmmPhase::Paused
                    && let Err(error) = machine.resume()
                {
                    tracing::error!("cannot go on after a failed cut: {}", chain(&error));
                }
                result.map_err(|e| e.wire())
            }
            Writing::Checkpoint(checkpoint) => machine
                .finish_checkpoint(*checkpoint)
                .map(Reply::Checkpoint)
                .map_err(|e| e.wire()),
        };
        self.answer(seq, result)
    }

    /// Carries out what waited, up to the next that has to be waited for.
    fn take_waiting(&mut self) -> Result<(), SessionError> {
        while self.writing.is_none()
            && let Some((seq, command, fds)) = self.later.pop_front()
        {
            if let Some(result) = self.obey(seq, command, fds)? {
                self.answer(seq, result)?;
            }
        }
        Ok(())
    }

    fn take_order(&mut self, buffer: &mut [u8]) -> Result<Next, SessionError> {
        let received = self.channel.recv(buffer).map_err(SessionError::Channel)?;
        let packet = buffer.get(..received.len).unwrap_or_default();
        let request: Request = match decode(packet) {
            Ok(request) => request,
            Err(error) => {
                // Without its number there is no way to answer; say so and go on.
                tracing::warn!(%error, "an order does not decode");
                return Ok(Next::Go);
            }
        };
        let Request { seq, command } = request;
        if matches!(command, Command::Stop) {
            self.answer(seq, Ok(Reply::Done))?;
            return Ok(Next::End(StopCause::Asked));
        }
        if let Some(result) = self.obey(seq, command, received.fds)? {
            self.answer(seq, result)?;
        }
        Ok(Next::Go)
    }

    /// Does what is asked; no answer if it comes later.
    fn obey(
        &mut self,
        seq: u64,
        command: Command,
        fds: Vec<OwnedFd>,
    ) -> Result<Option<Answer>, SessionError> {
        if let Command::Hello { version } = command {
            return Ok(Some(self.greet(version)));
        }
        if !self.greeted {
            return Ok(Some(Err(wrong_phase("say hello first"))));
        }
        let in_turn = matches!(
            command,
            Command::Cut(_)
                | Command::Checkpoint(_)
                | Command::Rollback(_)
                | Command::DropCheckpoint { .. }
                | Command::MergedLayer { .. }
                | Command::AttachDisk { .. }
        );
        if in_turn && self.writing.is_some() {
            if self.later.len() >= MAX_WAITING {
                return Ok(Some(Err(too_many())));
            }
            self.later.push_back((seq, command, fds));
            return Ok(None);
        }
        let mut fds = Fds::new(fds);
        let answer = match command {
            Command::Hello { .. } | Command::Stop => Ok(Reply::Done),
            Command::Prepare(spec) => self.prepare(&spec, fds),
            Command::Boot(spec) => self.with_machine(|m| m.boot(*spec, fds).map_err(|e| e.wire())),
            Command::Restore(spec) => {
                self.with_machine(|m| m.restore(*spec, fds).map_err(|e| e.wire()))
            }
            Command::Pause => self.with_machine(|m| m.pause().map_err(|e| e.wire())),
            Command::Resume => self.with_machine(|m| m.resume().map_err(|e| e.wire())),
            Command::Cut(spec) => return self.cut(seq, &spec, fds),
            Command::Checkpoint(spec) => return self.checkpoint(seq, &spec, fds),
            Command::Rollback(spec) => {
                self.agent_ready = false;
                self.notices.expect_ready();
                self.machine().and_then(|m| {
                    m.rollback(&spec, fds)
                        .map(Reply::Rollback)
                        .map_err(|e| e.wire())
                })
            }
            Command::DropCheckpoint { id } => self.machine().and_then(|m| {
                if m.drop_checkpoint(id) {
                    Ok(Reply::Done)
                } else {
                    Err(VmmError {
                        code: VmmErrorCode::NoCheckpoint,
                        message: format!("there is no checkpoint {id}"),
                    })
                }
            }),
            Command::MergedLayer { disk, layer } => self.with_machine(|m| {
                let file = fds
                    .file(layer)
                    .map_err(|e| wire_error(VmmErrorCode::BadRequest, &e))?;
                m.devices()
                    .merged_layer(disk, file)
                    .map_err(|e| wire_error(VmmErrorCode::BadRequest, &e))
            }),
            Command::SetNet { backend } => self.with_machine(|m| {
                m.devices().set_net(backend, &mut fds).map_err(|error| {
                    let code = match error {
                        DeviceSetError::Absent { .. } => VmmErrorCode::WrongPhase,
                        _ => VmmErrorCode::BadRequest,
                    };
                    wire_error(code, &error)
                })
            }),
            Command::AttachDisk { slot, disk } => self.with_machine(|m| {
                m.devices()
                    .attach_disk(slot, &disk, &mut fds)
                    .map_err(|e| wire_error(VmmErrorCode::BadRequest, &e))
            }),
            Command::PowerButton => self.with_machine(|m| {
                m.press_power_button();
                Ok(())
            }),
            Command::Balloon { target_mib } => self.with_machine(|m| {
                m.devices()
                    .set_balloon(target_mib)
                    .map_err(|e| wire_error(VmmErrorCode::WrongPhase, &e))
            }),
            Command::WorkingSet { output } => self.with_machine(|m| {
                let file = fds
                    .file(output)
                    .map_err(|e| wire_error(VmmErrorCode::BadRequest, &e))?;
                let set = m
                    .working_set()
                    .map_err(|e| wire_error(VmmErrorCode::Memory, &e))?;
                write_all(file, &set.encode()).map_err(|e| wire_error(VmmErrorCode::Io, &e))
            }),
            Command::Status => Ok(Reply::Status(self.status())),
            Command::Counters => Ok(Reply::Counters(self.counters())),
        };
        Ok(Some(answer))
    }

    fn greet(&mut self, version: u32) -> Answer {
        if version != PROTOCOL_VERSION {
            return Err(VmmError {
                code: VmmErrorCode::Version,
                message: format!("version {version} was offered, {PROTOCOL_VERSION} is spoken"),
            });
        }
        self.greeted = true;
        Ok(Reply::Hello {
            version: PROTOCOL_VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            engine: Engine::FORKD,
            capabilities: Capabilities::all(),
        })
    }

    fn prepare(&mut self, spec: &PrepareSpec, mut fds: Fds) -> Answer {
        if self.machine.is_some() {
            return Err(wrong_phase("there is a machine already"));
        }
        let bad_fd = |error: FdError| wire_error(VmmErrorCode::BadRequest, &error);
        let hypervisor = Hypervisor::from_fd(fds.take(spec.kvm).map_err(bad_fd)?)
            .map_err(|error| wire_error(VmmErrorCode::Kvm, &error))?;
        let pagemap = match spec.pagemap {
            Some(index) => Pagemap::from_fd(fds.take(index).map_err(bad_fd)?),
            None => Err(PagemapError::Missing),
        };
        if let Err(error) = &pagemap {
            tracing::warn!(%error, "every page counts as changed");
        }
        if let Some(jail) = &spec.jail {
            enter_jail(jail, &mut fds)?;
        }
        let machine = Machine::prepare(
            &hypervisor,
            spec.shape,
            pagemap,
            &self.notices,
            &thread_start(self.seccomp),
        )
        .map_err(|e| e.wire())?;
        if self.seccomp {
            seccomp::restrict_control().map_err(|e| wire_error(VmmErrorCode::Io, &e))?;
        }
        self.machine = Some(machine);
        Ok(Reply::Done)
    }

    fn machine(&mut self) -> Result<&mut Machine, VmmError> {
        self.machine
            .as_mut()
            .ok_or_else(|| wrong_phase("there is no machine yet"))
    }

    fn with_machine(&mut self, work: impl FnOnce(&mut Machine) -> Result<(), VmmError>) -> Answer {
        work(self.machine()?).map(|()| Reply::Done)
    }

    fn checkpoint(
        &mut self,
        seq: u64,
        spec: &forkd_vmm_proto::CheckpointSpec,
        fds: Fds,
    ) -> Result<Option<Answer>, SessionError> {
        let done = self
            .machine()
            .and_then(|m| m.checkpoint(spec, fds).map_err(|e| e.wire()));
        match done {
            Ok(CheckpointDone::Unchanged(report)) => Ok(Some(Ok(Reply::Checkpoint(report)))),
            Ok(CheckpointDone::Writing(checkpoint)) => {
                let pause_us = checkpoint.pause_us();
                self.writing = Some((seq, Writing::Checkpoint(checkpoint)));
                self.event(Event::CutTaken { seq, pause_us })?;
                Ok(None)
            }
            Err(error) => Ok(Some(Err(error))),
        }
    }

    fn cut(
        &mut self,
        seq: u64,
        spec: &forkd_vmm_proto::CutSpec,
        fds: Fds,
    ) -> Result<Option<Answer>, SessionError> {
        let Some(machine) = self.machine.as_mut() else {
            return Ok(Some(Err(wrong_phase("there is no machine yet"))));
        };
        match machine.cut(spec, fds) {
            Ok(done) => {
                self.writing = Some((seq, Writing::Cut(Box::new(done.progress))));
                let pause_us = done.pause.map_or(0, |pause| pause.as_micros() as u64);
                self.event(Event::CutTaken { seq, pause_us })?;
                Ok(None)
            }
            Err(error) => Ok(Some(Err(error.wire()))),
        }
    }

    fn status(&self) -> Status {
        Status {
            phase: self
                .machine
                .as_ref()
                .map_or(VmmPhase::Empty, Machine::phase),
            shape: self.machine.as_ref().map(Machine::shape),
            agent_ready: self.agent_ready,
        }
    }

    fn counters(&mut self) -> Counters {
        Counters(
            self.machine
                .as_mut()
                .map_or_else(Vec::new, Machine::counters),
        )
    }
}

/// A thread that cannot be restricted does not run.
/// Enters the jail. The shell is built inside of it, so that every thread is born there.
fn enter_jail(jail: &JailSpec, fds: &mut Fds) -> Result<(), VmmError> {
    if jail.namespaces.len() > MAX_NAMESPACES {
        return Err(VmmError {
            code: VmmErrorCode::BadRequest,
            message: format!("a jail has at most {MAX_NAMESPACES} namespaces"),
        });
    }
    let namespaces: Result<Vec<_>, FdError> = jail
        .namespaces
        .iter()
        .map(|index| fds.take(*index))
        .collect();
    let cell = Cell {
        namespaces: namespaces.map_err(|error| wire_error(VmmErrorCode::BadRequest, &error))?,
        user: jail.user,
        landlock: jail.landlock,
    };
    enter(cell).map_err(|error| wire_error(VmmErrorCode::Io, &error))
}

fn thread_start(restricted: bool) -> ThreadStart {
    if !restricted {
        return Arc::new(|_| {});
    }
    Arc::new(|kind| {
        if let Err(error) = seccomp::restrict(kind) {
            tracing::error!("{}", chain(&error));
            std::process::exit(ExitCode::Internal as i32);
        }
    })
}

fn wrong_phase(message: &str) -> VmmError {
    VmmError {
        code: VmmErrorCode::WrongPhase,
        message: message.to_owned(),
    }
}

fn too_many() -> VmmError {
    VmmError {
        code: VmmErrorCode::TooMany,
        message: format!("{MAX_WAITING} commands wait for a cut to be written"),
    }
}

fn write_all(mut file: std::fs::File, bytes: &[u8]) -> std::io::Result<()> {
    file.rewind()?;
    file.set_len(0)?;
    file.write_all(bytes)?;
    file.sync_all()
}
