//! The spawn protocol: starts fake VMMs as processes and hands their control sockets out.
//!
//! `forkd-spawn` itself needs `/dev/kvm`, cgroups and the rights of root for its jail; this one needs nothing. Every request
//! runs in a thread of its own, since a shell that is held must not hold up other requests. Each VMM has a thread that waits
//! for its end.
//!
//! Lock order: `vms` before `clients`.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use forkd_sys::Channel;
use forkd_types::{Digest, Engine, SandboxId};
use forkd_vmm_proto::spawn::{
    FromSpawn, HowEnded, Limits, MAX_BATCH, MissingWall, SPAWN_VERSION, SpawnCommand, SpawnError,
    SpawnReply, SpawnRequest, SpawnStatus, Vm, Walls,
};
use forkd_vmm_proto::{
    Capabilities, Command as VmmCommand, FdIndex, FromVmm, MAX_MESSAGE, PROTOCOL_VERSION,
    PrepareSpec, Request, Shape, decode, encode,
};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::vm::lock;

/// The file beside the program that names missing walls.
pub(crate) const MISSING_WALLS: &str = "missing-walls";
/// The file beside the program that has each memory limit that was set, in bytes; 0 is no limit.
pub(crate) const LIMITS: &str = "limits";

/// Serves daemons that connect to the socket.
pub fn spawn(socket: &Path, vmm: &Path) -> anyhow::Result<()> {
    let listener = listen_on(socket).with_context(|| format!("listen on {}", socket.display()))?;
    let spawner = Arc::new(Spawner {
        vmm: vmm.to_owned(),
        vms: Mutex::default(),
        clients: Mutex::default(),
        kept: Mutex::default(),
    });
    for number in 0.. {
        let client = accept_with(&listener, SocketFlags::CLOEXEC)?;
        let client = Arc::new(Channel::from_fd(client));
        lock(&spawner.clients).insert(number, Arc::clone(&client));
        let spawner = Arc::clone(&spawner);
        std::thread::spawn(move || {
            spawner.serve(number, &client);
            lock(&spawner.clients).remove(&number);
        });
    }
    Ok(())
}

fn listen_on(path: &Path) -> io::Result<OwnedFd> {
    // A spawner that was killed leaves its socket; the daemon starts another only if none answers.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    listen(&listener, 16)?;
    Ok(listener)
}

struct Spawner {
    vmm: PathBuf,
    /// Every id that is taken; `None` while its shell is made.
    vms: Mutex<BTreeMap<SandboxId, Option<Live>>>,
    clients: Mutex<HashMap<u64, Arc<Channel>>>,
    /// Descriptors that daemons left for their successors.
    kept: Mutex<BTreeMap<Digest, OwnedFd>>,
}

/// A VMM that was handed out.
struct Live {
    pid: u32,
    /// Its number may be another process's once it is reaped; this is not.
    process: OwnedFd,
    shape: Shape,
    control: Channel,
    /// Client and number of each request that waits for the end.
    killers: Vec<(u64, u64)>,
}

type Answer = (Result<SpawnReply, SpawnError>, Vec<OwnedFd>);

impl Spawner {
    fn serve(self: &Arc<Self>, number: u64, client: &Channel) {
        let mut buffer = vec![0; MAX_MESSAGE];
        while let Ok(received) = client.recv(&mut buffer) {
            let Ok(SpawnRequest { seq, command }) = decode(&buffer[..received.len]) else {
                return;
            };
            let this = Arc::clone(self);
            let fds = received.fds;
            std::thread::spawn(move || {
                if let Some((result, sockets)) = this.answer(number, seq, command, fds) {
                    let response = FromSpawn::Response { seq, result };
                    let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
                    this.send(number, &response, &sockets);
                }
            });
        }
    }

    /// Sends to a daemon, which may be gone.
    fn send(&self, client: u64, message: &FromSpawn, sockets: &[BorrowedFd<'_>]) -> bool {
        let client = lock(&self.clients).get(&client).cloned();
        let bytes = encode(message).unwrap_or_default();
        client.is_some_and(|client| client.send(&bytes, sockets).is_ok())
    }

    /// The answer; `None` if it comes later.
    fn answer(
        self: &Arc<Self>,
        client: u64,
        seq: u64,
        command: SpawnCommand,
        fds: Vec<OwnedFd>,
    ) -> Option<Answer> {
        let plain = |result| Some((result, Vec::new()));
        match command {
            SpawnCommand::Hello { version } if version != SPAWN_VERSION => {
                plain(Err(SpawnError::Version {
                    ours: SPAWN_VERSION,
                    theirs: version,
                }))
            }
            SpawnCommand::Hello { .. } => plain(Ok(SpawnReply::Hello {
                version: SPAWN_VERSION,
                engines: vec![Engine::FORKD],
                walls: Walls::empty(),
                missing: self.missing_walls(),
            })),
            SpawnCommand::Take { shape, ids, .. } => Some(self.take(client, shape, &ids)),
            SpawnCommand::Adopt { after } => Some(self.adopt(after.as_ref())),
            SpawnCommand::Kill { id } => self
                .kill(client, seq, &id)
                .map(|error| (Err(error), Vec::new())),
            // There are no pools: every shell is made when it is taken.
            SpawnCommand::SetPool { .. } => plain(Ok(SpawnReply::Done)),
            SpawnCommand::SetLimits { limits, .. } => {
                plain(self.note_limits(&limits).map(|()| SpawnReply::Done))
            }
            SpawnCommand::Keep { names } => {
                lock(&self.kept).extend(names.into_iter().zip(fds));
                plain(Ok(SpawnReply::Done))
            }
            SpawnCommand::Release { names } => {
                lock(&self.kept).retain(|name, _| !names.contains(name));
                plain(Ok(SpawnReply::Done))
            }
            SpawnCommand::Kept { after } => Some(self.kept(after)),
            SpawnCommand::Status => plain(Ok(SpawnReply::Status(SpawnStatus {
                live: lock(&self.vms).len() as u32,
                ..SpawnStatus::default()
            }))),
        }
    }

    /// The walls that a scenario has taken down: lines of a wall and its reason.
    fn missing_walls(&self) -> Vec<MissingWall> {
        let text = std::fs::read_to_string(self.vmm.with_file_name(MISSING_WALLS));
        text.unwrap_or_default()
            .lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(wall, reason)| MissingWall {
                wall: wall.to_owned(),
                reason: reason.to_owned(),
            })
            .collect()
    }

    /// Notes the memory limit of a VM in a file, in place of a cgroup.
    fn note_limits(&self, limits: &Limits) -> Result<(), SpawnError> {
        let path = self.vmm.with_file_name(LIMITS);
        let line = format!("{}\n", limits.memory_bytes.unwrap_or(0));
        let file = File::options().create(true).append(true).open(path);
        file.and_then(|mut file| io::Write::write_all(&mut file, line.as_bytes()))
            .map_err(|error| SpawnError::NoWall {
                wall: "memory".to_owned(),
                reason: error.to_string(),
            })
    }

    fn take(self: &Arc<Self>, client: u64, shape: Shape, ids: &[SandboxId]) -> Answer {
        {
            let mut vms = lock(&self.vms);
            if let Some(id) = ids.iter().find(|id| vms.contains_key(id)) {
                return (Err(SpawnError::Duplicate { id: id.clone() }), Vec::new());
            }
            vms.extend(ids.iter().map(|id| (id.clone(), None)));
        }
        // All shells are made at once, each by a thread.
        let making: Vec<_> = ids
            .iter()
            .map(|_| {
                let program = self.vmm.clone();
                std::thread::spawn(move || make_shell(&program, shape))
            })
            .collect();
        let made: Vec<io::Result<(Child, Channel)>> = making
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(io::Error::other("a panic")))
            })
            .collect();
        let failure = made
            .iter()
            .find_map(|made| made.as_ref().err().map(ToString::to_string));
        let gone = !lock(&self.clients).contains_key(&client);
        if let Some(reason) = failure.or(gone.then(|| "the daemon is gone".to_owned())) {
            for (mut child, _) in made.into_iter().flatten() {
                let _ = child.kill();
                let _ = child.wait();
            }
            lock(&self.vms).retain(|id, _| !ids.contains(id));
            return (Err(SpawnError::ShellFailed { reason }), Vec::new());
        }
        self.hand_out(shape, ids, made.into_iter().flatten())
    }

    fn hand_out(
        self: &Arc<Self>,
        shape: Shape,
        ids: &[SandboxId],
        made: impl Iterator<Item = (Child, Channel)>,
    ) -> Answer {
        let mut all = Vec::new();
        let mut sockets = Vec::new();
        for (id, (child, control)) in ids.iter().zip(made) {
            let Ok(process) = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) else {
                continue;
            };
            sockets.extend(control.as_fd().try_clone_to_owned());
            sockets.extend(process.try_clone());
            all.push(vm(id, child.id(), shape));
            let live = Live {
                pid: child.id(),
                process,
                shape,
                control,
                killers: Vec::new(),
            };
            lock(&self.vms).insert(id.clone(), Some(live));
            let (this, id) = (Arc::clone(self), id.clone());
            std::thread::spawn(move || this.wait(&id, child));
        }
        (Ok(SpawnReply::Taken(all)), sockets)
    }

    fn wait(&self, id: &SandboxId, mut child: Child) {
        let pid = child.id();
        let how = child.wait().map_or(HowEnded::Code(255), how);
        let live = lock(&self.vms).remove(id).flatten();
        for (client, seq) in live.into_iter().flat_map(|live| live.killers) {
            let result = Ok(SpawnReply::Done);
            self.send(client, &FromSpawn::Response { seq, result }, &[]);
        }
        let id = id.clone();
        let ended = FromSpawn::Exited { id, pid, how };
        let clients: Vec<u64> = lock(&self.clients).keys().copied().collect();
        for client in clients {
            self.send(client, &ended, &[]);
        }
    }

    fn adopt(&self, after: Option<&SandboxId>) -> Answer {
        let vms = lock(&self.vms);
        let mut rest = vms
            .iter()
            .filter(|(id, _)| after.is_none_or(|after| *id > after))
            .filter_map(|(id, live)| Some((id, live.as_ref()?)));
        let mut all = Vec::new();
        let mut sockets = Vec::new();
        for (id, live) in rest.by_ref().take(MAX_BATCH) {
            sockets.extend(live.control.as_fd().try_clone_to_owned());
            sockets.extend(live.process.try_clone());
            all.push(vm(id, live.pid, live.shape));
        }
        let more = rest.next().is_some();
        (Ok(SpawnReply::Adopted { vms: all, more }), sockets)
    }

    fn kept(&self, after: Option<Digest>) -> Answer {
        let kept = lock(&self.kept);
        let mut rest = kept
            .iter()
            .filter(|(name, _)| after.is_none_or(|after| **name > after));
        let (names, fds) = rest
            .by_ref()
            .take(MAX_BATCH)
            .filter_map(|(name, fd)| Some((*name, fd.try_clone().ok()?)))
            .unzip();
        let more = rest.next().is_some();
        (Ok(SpawnReply::Kept { names, more }), fds)
    }

    /// Answered by [`Self::wait`], unless there is no such VM.
    fn kill(&self, client: u64, seq: u64, id: &SandboxId) -> Option<SpawnError> {
        let mut vms = lock(&self.vms);
        let Some(Some(live)) = vms.get_mut(id) else {
            return Some(SpawnError::Unknown { id: id.clone() });
        };
        live.killers.push((client, seq));
        // The only failure left is that it has ended already.
        let _ = pidfd_send_signal(&live.process, Signal::KILL);
        None
    }
}

fn vm(id: &SandboxId, pid: u32, shape: Shape) -> Vm {
    Vm {
        id: id.clone(),
        pid,
        shape,
        capabilities: Capabilities::all(),
        pooled: false,
    }
}

fn how(status: ExitStatus) -> HowEnded {
    match (status.code(), status.signal()) {
        (Some(code), _) => HowEnded::Code(code as u8),
        (None, signal) => HowEnded::Signal(signal.unwrap_or(0) as u8),
    }
}

/// Starts a VMM process and has it build a shell.
fn make_shell(program: &Path, shape: Shape) -> io::Result<(Child, Channel)> {
    let (ours, theirs) = Channel::pair().map_err(io::Error::other)?;
    let mut child = Command::new(program)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .current_dir("/")
        .env_clear()
        .spawn()?;
    let hello = VmmCommand::Hello {
        version: PROTOCOL_VERSION,
    };
    let asked = ask(&ours, 1, hello, &[]).and_then(|()| {
        // A fake VMM has no use for KVM.
        let nothing = File::open("/dev/null")?;
        let spec = PrepareSpec {
            shape,
            kvm: FdIndex(0),
            pagemap: None,
            jail: None,
        };
        ask(&ours, 2, VmmCommand::Prepare(spec), &[nothing.as_fd()])
    });
    if let Err(error) = asked {
        let _ = child.kill();
        let _ = child.wait();
        return Err(error);
    }
    Ok((child, ours))
}

fn ask(control: &Channel, seq: u64, command: VmmCommand, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let request = encode(&Request { seq, command }).map_err(io::Error::other)?;
    control.send(&request, fds).map_err(io::Error::other)?;
    let mut buffer = vec![0; MAX_MESSAGE];
    let received = control.recv(&mut buffer).map_err(io::Error::other)?;
    match decode(&buffer[..received.len]).map_err(io::Error::other)? {
        FromVmm::Response(response) => response.result.map(drop).map_err(io::Error::other),
        FromVmm::Event(event) => Err(io::Error::other(format!("{event:?} before an answer"))),
    }
}
