//! `forkd-spawn`.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use forkd_types::{Digest, Engine, SandboxId};
use forkd_vmm_proto::spawn::{
    FromSpawn, HowEnded, Jail, Limits, MAX_BATCH, SPAWN_VERSION, SpawnCommand, SpawnError,
    SpawnReply, SpawnRequest, SpawnStatus, Vm, Walls,
};
use forkd_vmm_proto::{MAX_FDS, Shape};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::link::{Incoming, Link, LinkError, Unasked};
use crate::process::{KILL, Process};

/// Why `forkd-spawn` did not do what it was asked.
#[derive(Debug, Error)]
pub enum SpawnerError {
    /// There is nobody at that address.
    #[error("no forkd-spawn answers on {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// It could not be asked.
    #[error("forkd-spawn does not answer")]
    Link(#[from] LinkError),
    /// It said no.
    #[error("forkd-spawn refused")]
    Refused(#[source] SpawnError),
    /// It said something that is no answer to this.
    #[error("forkd-spawn gave an answer that does not fit: {reply:?}")]
    Unexpected {
        /// What it said.
        reply: Box<SpawnReply>,
    },
    /// A process was killed and does not go.
    #[error("the process of {id} is still there {} s after it was killed", KILL.as_secs())]
    StillThere {
        /// Whose.
        id: SandboxId,
    },
}

/// A VM and its control socket.
#[derive(Debug)]
pub struct Taken {
    /// What `forkd-spawn` says of it.
    pub vm: Vm,
    /// The controller's end, for [`crate::Vmm::new`].
    pub control: OwnedFd,
    /// The VMM process.
    pub process: Process,
}

/// A VM has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Whose it was.
    pub id: SandboxId,
    /// Its process id.
    pub pid: u32,
    /// How.
    pub how: HowEnded,
}

/// What the kernel calls the program's process.
const PROGRAM: &str = "forkd-spawn";

/// A connection to `forkd-spawn`.
#[derive(Debug)]
pub struct Spawner {
    link: Link<FromSpawn>,
    engine: Engine,
    walls: Walls,
}

impl Incoming for FromSpawn {
    fn max_fds(&self) -> usize {
        match self {
            Self::Response { .. } => MAX_FDS,
            Self::Exited { .. } => 0,
        }
    }

    /// All VMs of a host may end at once.
    const MAX_WAITING: usize = 1 << 16;

    fn answers(&self) -> Option<u64> {
        match self {
            Self::Response { seq, .. } => Some(*seq),
            Self::Exited { .. } => None,
        }
    }
}

/// Ends the `forkd-spawn` that listens there, and with it the VMs it has. Answers when it is gone. Whoever else listens is
/// left alone.
pub fn end_spawner(path: &Path) -> io::Result<()> {
    let socket = dial(path)?;
    let pid = rustix::net::sockopt::socket_peercred(&socket)?.pid;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let name = std::fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()))?;
    if name.trim_end() != PROGRAM {
        let text = format!(
            "process {} is {name:?}, not {PROGRAM}",
            pid.as_raw_nonzero()
        );
        return Err(io::Error::other(text));
    }
    pidfd_send_signal(&process, Signal::KILL)?;
    // Readable once the process has ended.
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    while let Err(error) = poll(&mut ended, None) {
        if error != Errno::INTR {
            return Err(error.into());
        }
    }
    Ok(())
}

fn dial(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

impl Spawner {
    /// Connects and says hello. The ends of VMs go to the returned stream.
    pub async fn connect(path: &Path) -> Result<(Self, Endings), SpawnerError> {
        let failed = |source: io::Error| SpawnerError::Connect {
            path: path.to_owned(),
            source,
        };
        let socket = dial(path).map_err(failed)?;
        let (link, receiver) = Link::new(socket, 1).map_err(failed)?;
        let mut spawner = Self {
            link,
            engine: Engine::FORKD,
            walls: Walls::empty(),
        };
        let hello = SpawnCommand::Hello {
            version: SPAWN_VERSION,
        };
        match spawner.ask(hello).await?.0 {
            SpawnReply::Hello { engine, walls, .. } => {
                spawner.engine = engine;
                spawner.walls = walls;
                Ok((spawner, Endings { receiver }))
            }
            reply => Err(unexpected(reply)),
        }
    }

    /// The engine of the VMs that `forkd-spawn` starts.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// The walls that stand around every VM.
    pub fn walls(&self) -> Walls {
        self.walls
    }

    /// Sets how many shells of a shape stand ready.
    pub async fn set_pool(&self, shape: Shape, depth: u32) -> Result<(), SpawnerError> {
        self.done(SpawnCommand::SetPool { shape, depth }).await
    }

    /// Takes one shell for each id. What dies on the way is missing from the answer. After a failure some ids may have a
    /// process: the caller ends them all.
    pub async fn take(
        &self,
        shape: Shape,
        ids: &[SandboxId],
        limits: &Limits,
        jail: Jail,
    ) -> Result<Vec<Taken>, SpawnerError> {
        let mut all = Vec::with_capacity(ids.len());
        for batch in ids.chunks(MAX_BATCH) {
            let command = SpawnCommand::Take {
                shape,
                ids: batch.to_vec(),
                limits: limits.clone(),
                jail,
            };
            match self.ask(command).await? {
                (SpawnReply::Taken(vms), sockets) => all.extend(pair(vms, sockets)),
                (reply, _) => return Err(unexpected(reply)),
            }
        }
        Ok(all)
    }

    /// Replaces the limits of a live VM.
    pub async fn set_limits(&self, id: &SandboxId, limits: Limits) -> Result<(), SpawnerError> {
        let id = id.clone();
        self.done(SpawnCommand::SetLimits { id, limits }).await
    }

    /// Asks for the control sockets of every VM that lives.
    pub async fn adopt(&self) -> Result<Vec<Taken>, SpawnerError> {
        let mut all: Vec<Taken> = Vec::new();
        loop {
            let after = all.last().map(|taken| taken.vm.id.clone());
            match self.ask(SpawnCommand::Adopt { after }).await? {
                (SpawnReply::Adopted { vms, more }, sockets) => {
                    let got = !vms.is_empty();
                    all.extend(pair(vms, sockets));
                    if !(more && got) {
                        return Ok(all);
                    }
                }
                (reply, _) => return Err(unexpected(reply)),
            }
        }
    }

    /// Ends a VM's process. Answers when it is gone.
    pub async fn kill(&self, id: &SandboxId) -> Result<(), SpawnerError> {
        let kill = self.done(SpawnCommand::Kill { id: id.clone() });
        let still_there = |_| SpawnerError::StillThere { id: id.clone() };
        tokio::time::timeout(KILL, kill)
            .await
            .map_err(still_there)?
    }

    /// Leaves copies of descriptors for a later controller.
    pub async fn keep(&self, files: &[(Digest, BorrowedFd<'_>)]) -> Result<(), SpawnerError> {
        for batch in files.chunks(MAX_BATCH) {
            let names = batch.iter().map(|(name, _)| *name).collect();
            let fds: Vec<_> = batch.iter().map(|(_, fd)| *fd).collect();
            match self.ask_with(SpawnCommand::Keep { names }, &fds).await?.0 {
                SpawnReply::Done => {}
                reply => return Err(unexpected(reply)),
            }
        }
        Ok(())
    }

    /// Closes the kept descriptors of these names.
    pub async fn release(&self, names: &[Digest]) -> Result<(), SpawnerError> {
        for batch in names.chunks(MAX_BATCH) {
            let names = batch.to_vec();
            self.done(SpawnCommand::Release { names }).await?;
        }
        Ok(())
    }

    /// Copies of every kept descriptor.
    pub async fn kept(&self) -> Result<Vec<(Digest, OwnedFd)>, SpawnerError> {
        let mut all: Vec<(Digest, OwnedFd)> = Vec::new();
        loop {
            let after = all.last().map(|(name, _)| *name);
            match self.ask(SpawnCommand::Kept { after }).await? {
                (SpawnReply::Kept { names, more }, fds) => {
                    let got = !names.is_empty();
                    all.extend(names.into_iter().zip(fds));
                    if !(more && got) {
                        return Ok(all);
                    }
                }
                (reply, _) => return Err(unexpected(reply)),
            }
        }
    }

    /// How the pools stand.
    pub async fn status(&self) -> Result<SpawnStatus, SpawnerError> {
        match self.ask(SpawnCommand::Status).await?.0 {
            SpawnReply::Status(status) => Ok(status),
            reply => Err(unexpected(reply)),
        }
    }

    async fn done(&self, command: SpawnCommand) -> Result<(), SpawnerError> {
        match self.ask(command).await?.0 {
            SpawnReply::Done => Ok(()),
            reply => Err(unexpected(reply)),
        }
    }

    async fn ask(&self, command: SpawnCommand) -> Result<(SpawnReply, Vec<OwnedFd>), SpawnerError> {
        self.ask_with(command, &[]).await
    }

    async fn ask_with(
        &self,
        command: SpawnCommand,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(SpawnReply, Vec<OwnedFd>), SpawnerError> {
        let (answer, fds) = self
            .link
            .ask(|seq| SpawnRequest { seq, command }, fds)
            .await?;
        match answer {
            FromSpawn::Response { result, .. } => Ok((result.map_err(SpawnerError::Refused)?, fds)),
            FromSpawn::Exited { .. } => Err(LinkError::Closed.into()),
        }
    }
}

/// The ends of VMs, as they come.
#[derive(Debug)]
pub struct Endings {
    receiver: mpsc::UnboundedReceiver<Unasked<FromSpawn>>,
}

impl Endings {
    /// The next VM that ends; `None` once `forkd-spawn` is gone.
    pub async fn next(&mut self) -> Option<Ended> {
        loop {
            if let FromSpawn::Exited { id, pid, how } = self.receiver.recv().await?.message {
                return Some(Ended { id, pid, how });
            }
        }
    }
}

/// Puts each VM together with its two descriptors.
fn pair(vms: Vec<Vm>, fds: Vec<OwnedFd>) -> impl Iterator<Item = Taken> {
    let mut fds = fds.into_iter();
    vms.into_iter().map_while(move |vm| {
        Some(Taken {
            vm,
            control: fds.next()?,
            process: Process::new(fds.next()?),
        })
    })
}

fn unexpected(reply: SpawnReply) -> SpawnerError {
    SpawnerError::Unexpected {
        reply: Box::new(reply),
    }
}
