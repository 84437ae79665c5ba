//! A small synchronous client of the control protocol, for tests and benchmarks.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command as Process, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use forkd_sys::{Channel, ChannelError};
use forkd_vmm_proto::{
    BootSpec, Command, Counters, CutReport, CutSpec, Event, FdIndex, FdList, FromVmm, MAX_MESSAGE,
    PROTOCOL_VERSION, PrepareSpec, Reply, Request, ResponseTo, RestoreSpec, Shape, VmmError,
    WireError, decode, encode,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use thiserror::Error;

/// Why a VMM did not do what was asked.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The program cannot be started.
    #[error("cannot start the VMM")]
    Spawn(#[source] io::Error),
    /// The socket failed.
    #[error("the control socket failed")]
    Channel(#[from] ChannelError),
    /// A message could not be made or read.
    #[error("a message is malformed")]
    Wire(#[from] WireError),
    /// The VMM said no.
    #[error("the VMM refused")]
    Refused(#[source] VmmError),
    /// The VMM answered something else.
    #[error("the VMM gave an answer that does not fit")]
    Unexpected,
    /// Nothing came in time.
    #[error("the VMM did not say anything for {0:?}")]
    Timeout(Duration),
}

/// The descriptors of a message, with the numbers under which it names them.
#[derive(Default)]
pub struct Attach<'a>(FdList<BorrowedFd<'a>>);

impl<'a> Attach<'a> {
    /// No descriptors yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a descriptor.
    pub fn add(&mut self, fd: &'a impl AsFd) -> FdIndex {
        self.0.push(fd)
    }

    /// All of them, to be sent.
    pub fn fds(&self) -> &[BorrowedFd<'a>] {
        self.0.as_slice()
    }
}

/// A VMM process and the controller's end of its socket.
pub struct Client {
    child: Child,
    channel: Channel,
    seq: u64,
    events: VecDeque<(Event, Vec<OwnedFd>)>,
    answers: Vec<ResponseTo>,
    buffer: Vec<u8>,
    timeout: Duration,
}

impl Client {
    /// Starts a VMM process and greets it.
    pub fn start(program: &Path, args: &[&str]) -> Result<Self, ClientError> {
        let (ours, theirs) = Channel::pair()?;
        rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())
            .map_err(|e| ClientError::Spawn(e.into()))?;
        let number = theirs.as_fd().as_raw_fd().to_string();
        let child = Process::new(program)
            .args(["--control-fd", &number])
            .args(args)
            .stdin(Stdio::null())
            .spawn()
            .map_err(ClientError::Spawn)?;
        drop(theirs);
        let mut client = Self {
            child,
            channel: ours,
            seq: 0,
            events: VecDeque::new(),
            answers: Vec::new(),
            buffer: vec![0; MAX_MESSAGE],
            timeout: Duration::from_secs(120),
        };
        match client.ask(
            Command::Hello {
                version: PROTOCOL_VERSION,
            },
            &Attach::new(),
        )? {
            Reply::Hello { .. } => Ok(client),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// How long to wait for anything.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command and gives its number.
    pub fn send(&mut self, command: Command, attach: &Attach<'_>) -> Result<u64, ClientError> {
        self.seq += 1;
        let request = Request {
            seq: self.seq,
            command,
        };
        self.channel.send(&encode(&request)?, attach.fds())?;
        Ok(self.seq)
    }

    /// Sends a command and waits for its answer.
    pub fn ask(&mut self, command: Command, attach: &Attach<'_>) -> Result<Reply, ClientError> {
        let seq = self.send(command, attach)?;
        self.answer_to(seq)
    }

    /// Waits for the answer to a command.
    pub fn answer_to(&mut self, seq: u64) -> Result<Reply, ClientError> {
        loop {
            if let Some(at) = self.answers.iter().position(|a| a.seq == seq) {
                return self
                    .answers
                    .swap_remove(at)
                    .result
                    .map_err(ClientError::Refused);
            }
            self.receive()?;
        }
    }

    /// Waits for an event that `wanted` takes; others before it are dropped.
    pub fn wait_event<T>(
        &mut self,
        mut wanted: impl FnMut(Event, Vec<OwnedFd>) -> Option<T>,
    ) -> Result<T, ClientError> {
        loop {
            while let Some((event, fds)) = self.events.pop_front() {
                if let Some(found) = wanted(event, fds) {
                    return Ok(found);
                }
            }
            self.receive()?;
        }
    }

    /// Waits until the guest says it is ready.
    pub fn wait_ready(&mut self) -> Result<(), ClientError> {
        self.wait_event(|event, _| matches!(event, Event::AgentReady).then_some(()))
    }

    pub fn counters(&mut self) -> Result<Counters, ClientError> {
        match self.ask(Command::Counters, &Attach::new())? {
            Reply::Counters(counters) => Ok(counters),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// How often the guest has reported that it is ready, events or not.
    pub fn ready_signals(&mut self) -> Result<u64, ClientError> {
        let found = self
            .counters()?
            .0
            .into_iter()
            .find(|(name, _)| name == "machine.ready_signals");
        found.map(|(_, count)| count).ok_or(ClientError::Unexpected)
    }

    fn receive(&mut self) -> Result<(), ClientError> {
        let end = Instant::now() + self.timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let left = Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let mut fds = [PollFd::new(&self.channel, PollFlags::IN)];
            match poll(&mut fds, Some(&left)) {
                Ok(0) => return Err(ClientError::Timeout(self.timeout)),
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(ChannelError::Io(e.into()).into()),
            }
        }
        let got = self.channel.recv(&mut self.buffer)?;
        let packet = self.buffer.get(..got.len).unwrap_or_default();
        match decode::<FromVmm>(packet)? {
            FromVmm::Event(event) => self.events.push_back((event, got.fds)),
            FromVmm::Response(response) => self.answers.push(response),
        }
        Ok(())
    }

    /// Builds the shell.
    pub fn prepare(&mut self, shape: Shape) -> Result<(), ClientError> {
        let kvm = File::open("/dev/kvm").map_err(ClientError::Spawn)?;
        let pagemap = forkd_sys::open_pagemap(Pid::from_child(&self.child));
        let pagemap = pagemap.map_err(ClientError::Spawn)?;
        let mut attach = Attach::new();
        let spec = PrepareSpec {
            shape,
            kvm: attach.add(&kvm),
            pagemap: Some(attach.add(&pagemap)),
            jail: None,
        };
        self.ask(Command::Prepare(spec), &attach).map(drop)
    }

    pub fn boot(&mut self, spec: BootSpec, attach: &Attach<'_>) -> Result<(), ClientError> {
        self.ask(Command::Boot(Box::new(spec)), attach).map(drop)
    }

    pub fn restore(&mut self, spec: RestoreSpec, attach: &Attach<'_>) -> Result<(), ClientError> {
        self.ask(Command::Restore(Box::new(spec)), attach).map(drop)
    }

    /// Cuts, and waits until all is written.
    pub fn cut(&mut self, spec: CutSpec, attach: &Attach<'_>) -> Result<CutReport, ClientError> {
        match self.ask(Command::Cut(spec), attach)? {
            Reply::Cut(report) => Ok(report),
            _ => Err(ClientError::Unexpected),
        }
    }

    /// Stops the VMM and waits for its end.
    pub fn stop(mut self) -> Result<ExitStatus, ClientError> {
        self.send(Command::Stop, &Attach::new())?;
        self.wait_exit()
    }

    /// Waits for the end of the process.
    pub fn wait_exit(mut self) -> Result<ExitStatus, ClientError> {
        self.child.wait().map_err(ClientError::Spawn)
    }
}

/// Kills a VMM that still runs.
impl Drop for Client {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
