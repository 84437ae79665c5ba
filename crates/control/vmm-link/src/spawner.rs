//! The client of `forkd-spawn`.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forkd_types::{Digest, Engine, SandboxId};
use forkd_vmm_proto::spawn::{
    FromSpawn, HowEnded, Jail, Limits, MAX_BATCH, MissingWall, SPAWN_VERSION, SpawnCommand,
    SpawnError, SpawnReply, SpawnRequest, SpawnStatus, Vm, Walls,
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
    /// No program listens on the socket.
    #[error("no forkd-spawn answers on {}", path.display())]
    Connect {
        path: PathBuf,
        /// The failure of the system.
        #[source]
        source: io::Error,
    },
    /// It could not be asked.
    #[error("forkd-spawn does not answer")]
    Link(#[from] LinkError),
    /// The answer did not come in time. The connection is of no more use.
    #[error("forkd-spawn has not answered for {} s", after.as_secs())]
    Late {
        /// The deadline that has passed.
        after: Duration,
    },
    /// It said no.
    #[error("forkd-spawn refused")]
    Refused(#[source] SpawnError),
    /// It said something that is no answer to this.
    #[error("forkd-spawn gave an answer that does not fit: {reply:?}")]
    Unexpected {
        /// The unexpected reply.
        reply: Box<SpawnReply>,
    },
    /// A process was killed and does not go.
    #[error("the process of {id} is still there {} s after it was killed", KILL.as_secs())]
    StillThere { id: SandboxId },
}

/// A VM and its control socket.
#[derive(Debug)]
pub struct Taken {
    /// The VM as `forkd-spawn` reports it.
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
    pub how: HowEnded,
}

/// How long `forkd-spawn` may take for an answer that needs no new process.
const ANSWER: Duration = Duration::from_secs(30);
/// How long it may take to start the VMMs of one batch.
const TAKE: Duration = Duration::from_secs(300);

/// Name of the program's process.
const PROGRAM: &str = "forkd-spawn";

/// A connection to `forkd-spawn`.
#[derive(Debug)]
pub struct Spawner {
    link: Link<FromSpawn>,
    engines: Vec<Engine>,
    walls: Walls,
    missing: Vec<MissingWall>,
    /// The deadline of answers that need no new process.
    answer: Duration,
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

/// Ends the `forkd-spawn` that listens there, and with it the VMs it has. Returns when it is gone. A process of
/// another name is left alone.
pub fn end_spawner(path: &Path) -> io::Result<()> {
    end_listener(path, PROGRAM)
}

/// Kills the process of this name that listens at the path and waits for its end. A process of another name is left alone.
pub(crate) fn end_listener(path: &Path, program: &str) -> io::Result<()> {
    let socket = dial(path)?;
    let pid = rustix::net::sockopt::socket_peercred(&socket)?.pid;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let name = std::fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()))?;
    if name.trim_end() != program {
        let text = format!(
            "process {} is {name:?}, not {program}",
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

/// Connects to a program of this host. Never blocks: a program whose queue of connections is full is an error.
pub(crate) fn dial(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

impl Spawner {
    /// Connects and says hello. The ends of VMs go to the returned stream.
    pub async fn connect(path: &Path) -> Result<(Self, Endings), SpawnerError> {
        Self::connect_with(path, ANSWER).await
    }

    async fn connect_with(path: &Path, answer: Duration) -> Result<(Self, Endings), SpawnerError> {
        let failed = |source: io::Error| SpawnerError::Connect {
            path: path.to_owned(),
            source,
        };
        let socket = dial(path).map_err(failed)?;
        let (link, receiver) = Link::new(socket, 1).map_err(failed)?;
        let mut spawner = Self {
            link,
            engines: Vec::new(),
            walls: Walls::empty(),
            missing: Vec::new(),
            answer,
        };
        let hello = SpawnCommand::Hello {
            version: SPAWN_VERSION,
        };
        match spawner.ask(hello).await?.0 {
            SpawnReply::Hello {
                engines,
                walls,
                missing,
                ..
            } => {
                spawner.engines = engines;
                spawner.walls = walls;
                spawner.missing = missing;
                Ok((spawner, Endings { receiver }))
            }
            reply => Err(unexpected(reply)),
        }
    }

    /// The engines of the VMs that `forkd-spawn` can start.
    pub fn engines(&self) -> &[Engine] {
        &self.engines
    }

    /// The walls that stand around every VM.
    pub fn walls(&self) -> Walls {
        self.walls
    }

    /// The walls that do not stand, with reasons.
    pub fn missing_walls(&self) -> &[MissingWall] {
        &self.missing
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
        match self.done(SpawnCommand::Kill { id: id.clone() }).await {
            Err(SpawnerError::Late { .. }) => Err(SpawnerError::StillThere { id: id.clone() }),
            result => result,
        }
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
        let after = match command {
            SpawnCommand::Take { .. } => TAKE,
            SpawnCommand::Kill { .. } => KILL,
            _ => self.answer,
        };
        let asked = self.link.ask(|seq| SpawnRequest { seq, command }, fds);
        let late = |_| SpawnerError::Late { after };
        let (answer, fds) = tokio::time::timeout(after, asked).await.map_err(late)??;
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use forkd_channel::Channel;
    use forkd_vmm_proto::{MAX_MESSAGE, decode, encode};
    use rustix::net::{accept, bind, listen, socket};

    use super::*;

    /// Answers one controller's hello, and nothing after it.
    fn silent(path: &Path) {
        let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        std::thread::spawn(move || {
            let connection = Channel::from_fd(accept(&listener).unwrap());
            let mut packet = vec![0; MAX_MESSAGE];
            let received = connection.recv(&mut packet).unwrap();
            let hello: SpawnRequest = decode(&packet[..received.len]).unwrap();
            let reply = SpawnReply::Hello {
                version: SPAWN_VERSION,
                engines: vec![Engine::FORKD],
                walls: Walls::empty(),
                missing: Vec::new(),
            };
            let answer = FromSpawn::Response {
                seq: hello.seq,
                result: Ok(reply),
            };
            connection.send(&encode(&answer).unwrap(), &[]).unwrap();
            // Until the controller has gone.
            while connection.recv(&mut packet).is_ok() {}
        });
    }

    #[test]
    fn a_full_queue_of_connections_is_an_error_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spawn.sock");
        let listener = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 0).unwrap();
        let mut connections = Vec::new();
        // No program accepts, so a connection that blocks would hang here.
        let refused = loop {
            match dial(&path) {
                Ok(connection) => connections.push(connection),
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
    }

    #[tokio::test]
    async fn a_spawner_that_falls_silent_meets_every_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spawn.sock");
        silent(&path);
        let answer = Duration::from_millis(500);
        let (spawner, _endings) = Spawner::connect_with(&path, answer).await.unwrap();
        let name = Digest([1; 32]);
        let file = tempfile::tempfile().unwrap();
        let late = [
            spawner.keep(&[(name, file.as_fd())]).await,
            spawner.release(&[name]).await,
            spawner.kept().await.map(drop),
            spawner.status().await.map(drop),
            spawner.adopt().await.map(drop),
        ];
        for result in late {
            assert!(
                matches!(result, Err(SpawnerError::Late { .. })),
                "{result:?}"
            );
        }
    }
}
