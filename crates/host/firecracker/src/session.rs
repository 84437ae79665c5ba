//! The control loop: commands of the daemon, news of the relay, the end of Firecracker.
//!
//! ```text
//!   Hello ──► Prepare ──► Boot or Restore ──► running ⇄ paused ──Stop, or Firecracker ends──► gone
//!                              │ jail is entered, Firecracker starts
//!                              └ failed: only Stop is left
//! ```
//!
//! Commands are carried out one after another. Operations that Firecracker lacks are refused with
//! [`VmmErrorCode::Unsupported`]; [`ENGINE_CAPABILITIES`] announces that they are missing.

mod cut;
mod error;
mod launch;

use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use forkd_sys::{Channel, ChannelError};
use forkd_types::Engine;
use forkd_vmm_proto::{
    Capabilities, Command, Counters, CpuModel, Event, ExitCode, Fds, FromVmm, JailSpec,
    MAX_MESSAGE, MAX_NAMESPACES, PROTOCOL_VERSION, PrepareSpec, Reply, Request, ResponseTo, Shape,
    Status, StopCause, VmmError, VmmErrorCode, VmmPhase, WireError, decode, encode,
};
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::json;
use thiserror::Error;

use crate::disk::FlatDisk;
use crate::process::Firecracker;
use error::{OperationError, refusal, wrong_phase};

/// The abilities of the engine: none of those that an engine may lack.
///
/// Firecracker stops a VM while it writes all of its memory, keeps no checkpoints, and takes memory from one file. A
/// process belongs to one VM from its start, so there is nothing to keep ready in a pool.
pub const ENGINE_CAPABILITIES: Capabilities = Capabilities::empty();

/// How long Firecracker may take for a plain request.
const PLAIN: Duration = Duration::from_secs(20);
/// How long Firecracker may take to write or load a snapshot.
const SNAPSHOT: Duration = Duration::from_secs(300);

/// Why the control loop cannot go on.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The control socket failed.
    #[error("the control socket failed")]
    Channel(#[source] ChannelError),
    /// A message of this program does not encode.
    #[error("a message cannot be encoded")]
    Wire(#[from] WireError),
    /// A system call of the loop failed.
    #[error("cannot wait for events")]
    Wait(#[source] io::Error),
}

type Answer = Result<Reply, VmmError>;

/// A jail that waits to be entered.
#[derive(Debug)]
struct Jail {
    user: Option<u32>,
    landlock: bool,
    namespaces: Vec<OwnedFd>,
}

/// A VM that runs or is paused.
#[derive(Debug)]
struct Vm {
    process: Firecracker,
    disks: Vec<FlatDisk>,
    paused: bool,
    /// The number of cuts that succeeded.
    cuts: u64,
}

#[derive(Debug)]
enum State {
    Empty,
    Prepared(Option<Jail>),
    Live(Box<Vm>),
    /// A boot or restore failed; only `Stop` is left.
    UsedUp,
}

enum Next {
    Go,
    End(StopCause),
}

/// One VM and its control socket.
#[derive(Debug)]
pub struct Session {
    channel: Channel,
    firecracker: PathBuf,
    dir: PathBuf,
    greeted: bool,
    shape: Option<Shape>,
    state: State,
    agent_ready: bool,
    notices: PipeReader,
    /// Given to the relay.
    tell: PipeWriter,
}

impl Session {
    /// A session without a VM.
    pub fn new(channel: Channel, firecracker: PathBuf, dir: PathBuf) -> io::Result<Self> {
        let (notices, tell) = io::pipe()?;
        for end in [notices.as_fd(), tell.as_fd()] {
            rustix::fs::fcntl_setfl(end, rustix::fs::OFlags::NONBLOCK)?;
        }
        Ok(Self {
            channel,
            firecracker,
            dir,
            greeted: false,
            shape: None,
            state: State::Empty,
            agent_ready: false,
            notices,
            tell,
        })
    }

    /// Serves until the VM ends, the daemon says so, or the control socket closes.
    pub fn run(mut self) -> Result<ExitCode, SessionError> {
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            let (command, news, ended) = self.wait()?;
            if news {
                self.tell_news()?;
            }
            if ended && let Some(cause) = self.cause() {
                return self.end(cause);
            }
            if !command {
                continue;
            }
            match self.take_command(&mut buffer) {
                Ok(Next::Go) => {}
                Ok(Next::End(cause)) => return self.end(cause),
                Err(SessionError::Channel(ChannelError::Closed)) => {
                    return Ok(ExitCode::ControlLost);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for a command, news of the relay, or the end of Firecracker.
    fn wait(&self) -> Result<(bool, bool, bool), SessionError> {
        let mut fds = vec![
            PollFd::new(&self.channel, PollFlags::IN),
            PollFd::new(&self.notices, PollFlags::IN),
        ];
        if let State::Live(vm) = &self.state {
            fds.push(PollFd::new(&vm.process, PollFlags::IN));
        }
        loop {
            match poll(&mut fds, None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(SessionError::Wait(error.into())),
            }
        }
        let seen = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        Ok((seen(0), seen(1), seen(2)))
    }

    fn tell_news(&mut self) -> Result<(), SessionError> {
        let mut bytes = [0; 64];
        let heard = matches!(self.notices.read(&mut bytes), Ok(1..));
        // A guest may connect to the ready port as often as it likes; once is news.
        if heard && !self.agent_ready {
            self.agent_ready = true;
            self.event(Event::AgentReady)?;
        }
        Ok(())
    }

    /// Why the VM ended, if it has.
    fn cause(&mut self) -> Option<StopCause> {
        let State::Live(vm) = &mut self.state else {
            return None;
        };
        Some(stop_cause(vm.process.ended()?))
    }

    fn end(self, cause: StopCause) -> Result<ExitCode, SessionError> {
        // The socket may be closed; the exit status has the same information.
        let _ = self.event(Event::Stopped { cause });
        Ok(cause.into())
    }

    fn take_command(&mut self, buffer: &mut [u8]) -> Result<Next, SessionError> {
        let received = self.channel.recv(buffer).map_err(SessionError::Channel)?;
        let packet = buffer.get(..received.len).unwrap_or_default();
        // Without its number a command cannot be answered.
        let Ok(Request { seq, command }) = decode(packet) else {
            return Ok(Next::Go);
        };
        if matches!(command, Command::Stop) {
            self.answer(seq, Ok(Reply::Done))?;
            return Ok(Next::End(StopCause::Asked));
        }
        let answer = self.obey(seq, command, Fds::new(received.fds))?;
        self.answer(seq, answer)?;
        Ok(Next::Go)
    }

    fn obey(&mut self, seq: u64, command: Command, fds: Fds) -> Result<Answer, SessionError> {
        if let Command::Hello { version } = command {
            return Ok(self.greet(version));
        }
        if !self.greeted {
            return Ok(Err(wrong_phase("say hello first")));
        }
        Ok(match command {
            Command::Hello { .. } | Command::Stop => Ok(Reply::Done),
            Command::Prepare(spec) => self.prepare(&spec, fds),
            Command::Boot(spec) => self.boot(&spec, fds),
            Command::Restore(spec) => self.restore(&spec, fds),
            Command::Pause => self.set_paused(true),
            Command::Resume => self.set_paused(false),
            Command::Cut(spec) => return self.cut(seq, &spec, fds),
            Command::MergedLayer { disk, layer } => self.merged_layer(disk, layer, fds),
            Command::Status => Ok(Reply::Status(self.status())),
            Command::Counters => Ok(Reply::Counters(Counters::default())),
            Command::Checkpoint(_) => unsupported("checkpoints"),
            Command::Rollback(_) | Command::DropCheckpoint { .. } => unsupported("roll-back"),
            Command::SetNet { .. } => unsupported("a network device"),
            Command::AttachDisk { .. } => unsupported("a disk that is attached later"),
            Command::PowerButton => unsupported("a power button"),
            Command::Balloon { .. } => unsupported("a balloon"),
            Command::WorkingSet { .. } => unsupported("recording a working set"),
        })
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
            program: concat!("forkd-fc ", env!("CARGO_PKG_VERSION")).to_owned(),
            engine: Engine::FIRECRACKER,
            capabilities: ENGINE_CAPABILITIES,
        })
    }

    /// Notes the shape and the jail. Both are used when it is known what fills the VM: Firecracker has no empty VM.
    fn prepare(&mut self, spec: &PrepareSpec, fds: Fds) -> Answer {
        if !matches!(self.state, State::Empty) {
            return Err(wrong_phase("there is a VM already"));
        }
        if spec.shape.engine != Engine::FIRECRACKER {
            let message = format!("this VMM is not of the engine {}", spec.shape.engine);
            return Err(refusal(VmmErrorCode::BadRequest, &message));
        }
        if spec.shape.cpu != CpuModel::Host {
            return unsupported("the baseline CPU model");
        }
        let jail = spec.jail.as_ref().map(|jail| read_jail(jail, fds));
        self.state = State::Prepared(jail.transpose()?);
        self.shape = Some(spec.shape);
        Ok(Reply::Done)
    }

    fn live(&mut self) -> Result<&mut Vm, VmmError> {
        match &mut self.state {
            State::Live(vm) => Ok(vm),
            _ => Err(wrong_phase("there is no running VM")),
        }
    }

    fn set_paused(&mut self, paused: bool) -> Answer {
        let vm = self.live()?;
        if vm.paused != paused {
            vm.set_paused(paused).map_err(|error| error.wire())?;
        }
        Ok(Reply::Done)
    }

    fn merged_layer(&mut self, disk: u8, layer: forkd_vmm_proto::FdIndex, mut fds: Fds) -> Answer {
        let vm = self.live()?;
        let layer = fds
            .file(layer)
            .map_err(|error| OperationError::from(error).wire())?;
        let mut writable = vm.disks.iter_mut().filter(|disk| disk.writable());
        let disk = writable
            .nth(disk.into())
            .ok_or_else(|| OperationError::Request("there is no such disk").wire())?;
        disk.take_merged(layer)
            .map_err(|error| OperationError::from(error).wire())?;
        Ok(Reply::Done)
    }

    fn status(&self) -> Status {
        let phase = match &self.state {
            State::Empty => VmmPhase::Empty,
            State::Prepared(_) | State::UsedUp => VmmPhase::Shell,
            State::Live(vm) if vm.paused => VmmPhase::Paused,
            State::Live(_) => VmmPhase::Running,
        };
        Status {
            phase,
            shape: self.shape,
            agent_ready: self.agent_ready,
        }
    }

    fn event(&self, event: Event) -> Result<(), SessionError> {
        self.send(&FromVmm::Event(event))
    }

    fn answer(&self, seq: u64, result: Answer) -> Result<(), SessionError> {
        self.send(&FromVmm::Response(ResponseTo { seq, result }))
    }

    fn send(&self, message: &FromVmm) -> Result<(), SessionError> {
        self.channel
            .send(&encode(message)?, &[])
            .map_err(SessionError::Channel)
    }
}

impl Vm {
    fn set_paused(&mut self, paused: bool) -> Result<(), OperationError> {
        let state = if paused { "Paused" } else { "Resumed" };
        let api = self.process.api();
        api.patch("/vm", &json!({ "state": state }), PLAIN)?;
        self.paused = paused;
        Ok(())
    }
}

fn read_jail(spec: &JailSpec, mut fds: Fds) -> Result<Jail, VmmError> {
    if spec.namespaces.len() > MAX_NAMESPACES {
        let message = format!("a jail has at most {MAX_NAMESPACES} namespaces");
        return Err(refusal(VmmErrorCode::BadRequest, &message));
    }
    let namespaces: Result<Vec<OwnedFd>, _> = spec
        .namespaces
        .iter()
        .map(|index| fds.take(*index))
        .collect();
    Ok(Jail {
        user: spec.user,
        landlock: spec.landlock,
        namespaces: namespaces.map_err(|error| OperationError::from(error).wire())?,
    })
}

fn unsupported(ability: &str) -> Answer {
    let message = format!("the engine {} lacks {ability}", Engine::FIRECRACKER);
    Err(refusal(VmmErrorCode::Unsupported, &message))
}

/// Firecracker ends with status 0 when the guest powers off or reboots, which it does not tell apart.
fn stop_cause(status: ExitStatus) -> StopCause {
    if status.success() {
        StopCause::PowerOff
    } else {
        StopCause::VcpuFailed
    }
}
