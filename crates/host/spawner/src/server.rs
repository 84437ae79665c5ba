//! The loop: clients, processes and pools on one epoll descriptor.
//!
//! ```text
//!   start ──► making ──Hello, Prepare answered──► ready (in a pool) ──Take──► live ──► ended
//!                └──────────── a Take is waiting ────────────────────────────►┘
//! ```
//!
//! Every process is in exactly one of these states, and every state ends when its pidfd says so.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forkd_types::{Engine, SandboxId};
use forkd_vmm_proto::spawn::{
    FromSpawn, HowEnded, MAX_BATCH, MAX_POOL, SPAWN_VERSION, SpawnCommand, SpawnError, SpawnReply,
    SpawnRequest, SpawnStatus, Vm,
};
use forkd_vmm_proto::{Capabilities, Capability, FromVmm, Shape, decode};
use rustix::event::epoll;

use crate::client::{Client, Received, would_block};
use crate::handshake::{self, BeginError, Progress, Progressed};
use crate::pool::Pools;
use crate::process::Process;

/// The most controllers connected at one time: one that works, one that takes over, and a few that look.
const MAX_CLIENTS: usize = 16;

/// A burst of takes is over when none has come for this long; only then are the pools refilled, since
/// making shells would compete with the children that have just started.
const QUIET: Duration = Duration::from_millis(50);
/// Takes that never pause do not hold refilling up for longer than this.
const LONGEST_HOLD: Duration = Duration::from_millis(500);

/// What a program start is told.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The VMM program.
    pub vmm: PathBuf,
    /// The engine that the program is.
    pub engine: Engine,
    /// How many shells are made for the pools at one time.
    pub parallel: u32,
    /// The most processes there may be.
    pub max_processes: usize,
}

/// What a number in an epoll event stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Listener,
    Client(u64),
    /// The control socket of a process that is in the making.
    Control(u64),
    /// The end of a process.
    End(u64),
}

impl Token {
    fn to_data(self) -> epoll::EventData {
        let (kind, number) = match self {
            Self::Listener => (0, 0),
            Self::Client(n) => (1, n),
            Self::Control(n) => (2, n),
            Self::End(n) => (3, n),
        };
        epoll::EventData::new_u64(number << 2 | kind)
    }

    fn from_data(data: epoll::EventData) -> Self {
        let number = data.u64() >> 2;
        match data.u64() & 3 {
            0 => Self::Listener,
            1 => Self::Client(number),
            2 => Self::Control(number),
            _ => Self::End(number),
        }
    }
}

/// A process and what it is at.
#[derive(Debug)]
struct Entry {
    process: Process,
    shape: Shape,
    state: State,
    /// Announced by the VMM; empty before.
    capabilities: Capabilities,
    /// Client and number of each request that waits for its end.
    killers: Vec<(u64, u64)>,
}

#[derive(Debug)]
enum State {
    Making { for_pool: bool, progress: Progress },
    Ready,
    Live(SandboxId),
}

/// A `Take` that waits for shells.
#[derive(Debug)]
struct PendingTake {
    client: u64,
    seq: u64,
    shape: Shape,
    ids: Vec<SandboxId>,
    /// Processes reserved so far, and whether each came from the pool.
    got: Vec<(u64, bool)>,
}

/// All that `forkd-spawn` knows.
#[derive(Debug)]
pub struct Server {
    settings: Settings,
    epoll: OwnedFd,
    listener: OwnedFd,
    /// `/dev/kvm`, open from the first VMM on. All of them share it: the device keeps no state per file.
    kvm: Option<OwnedFd>,
    clients: HashMap<u64, Client>,
    processes: HashMap<u64, Entry>,
    live: BTreeMap<SandboxId, u64>,
    pools: Pools<u64>,
    pending: VecDeque<PendingTake>,
    shells_lost: u64,
    burst: Option<BurstOfTakes>,
    next: u64,
}

/// Takes that follow closely on each other.
#[derive(Debug, Clone, Copy)]
struct BurstOfTakes {
    first: Instant,
    last: Instant,
}

impl BurstOfTakes {
    fn over_at(self) -> Instant {
        (self.last + QUIET).min(self.first + LONGEST_HOLD)
    }
}

impl Server {
    /// A server on a listening `SOCK_SEQPACKET` socket.
    pub fn new(settings: Settings, listener: OwnedFd) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            &listener,
            Token::Listener.to_data(),
            epoll::EventFlags::IN,
        )?;
        let pools = Pools::new(settings.parallel);
        Ok(Self {
            settings,
            epoll,
            listener,
            kvm: None,
            clients: HashMap::new(),
            processes: HashMap::new(),
            live: BTreeMap::new(),
            pools,
            pending: VecDeque::new(),
            shells_lost: 0,
            burst: None,
            next: 1,
        })
    }

    /// Serves until the epoll descriptor itself fails.
    pub fn run(&mut self) -> std::io::Result<()> {
        let mut events = Vec::with_capacity(64);
        loop {
            self.refill();
            events.clear();
            let wake = self.burst.map(BurstOfTakes::over_at);
            let timeout = wake
                .into_iter()
                .chain(self.pools.next_attempt())
                .min()
                .map(until);
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in events.drain(..) {
                match Token::from_data(event.data) {
                    Token::Listener => self.accept(),
                    Token::Client(number) => self.client_event(number, event.flags),
                    Token::Control(number) => self.control_event(number),
                    Token::End(number) => self.process_ended(number),
                }
            }
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn accept(&mut self) {
        let Some(client) = Client::accept(self.listener.as_fd()) else {
            return;
        };
        if self.clients.len() >= MAX_CLIENTS {
            crate::say(&format!("a connection is refused: {MAX_CLIENTS} are open"));
            return;
        }
        let number = self.number();
        if watch(&self.epoll, client.fd(), Token::Client(number)) {
            self.clients.insert(number, client);
        }
    }

    fn client_event(&mut self, number: u64, flags: epoll::EventFlags) {
        if flags.contains(epoll::EventFlags::OUT) {
            self.flush(number);
        }
        loop {
            let Some(client) = self.clients.get_mut(&number) else {
                return;
            };
            match client.receive() {
                Received::Nothing => return,
                Received::Closed => return self.drop_client(number),
                Received::Message(request) => self.request(number, request),
            }
        }
    }

    fn drop_client(&mut self, number: u64) {
        self.clients.remove(&number);
        let (gone, kept) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|take| take.client == number);
        self.pending = kept;
        let gone: VecDeque<PendingTake> = gone;
        for take in gone {
            self.give_back(&take);
        }
    }

    fn request(&mut self, client: u64, request: SpawnRequest) {
        let greeted = self.clients.get(&client).is_some_and(|c| c.greeted);
        let seq = request.seq;
        let result = match request.command {
            SpawnCommand::Hello { version } => self.hello(client, version),
            _ if !greeted => Err(SpawnError::NoHello),
            SpawnCommand::SetPool { shape, depth } => self.set_pool(shape, depth),
            SpawnCommand::Take { shape, ids } => match self.take(client, seq, shape, ids) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            SpawnCommand::Adopt { after } => return self.adopt(client, seq, after.as_ref()),
            SpawnCommand::Kill { id } => match self.kill(client, seq, &id) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            SpawnCommand::Status => Ok(SpawnReply::Status(self.status())),
        };
        self.send(client, &FromSpawn::Response { seq, result }, Vec::new());
    }

    fn hello(&mut self, client: u64, version: u32) -> Result<SpawnReply, SpawnError> {
        if version != SPAWN_VERSION {
            return Err(SpawnError::Version {
                ours: SPAWN_VERSION,
                theirs: version,
            });
        }
        if let Some(client) = self.clients.get_mut(&client) {
            client.greeted = true;
        }
        Ok(SpawnReply::Hello {
            version: SPAWN_VERSION,
            engine: self.settings.engine,
        })
    }

    fn set_pool(&mut self, shape: Shape, depth: u32) -> Result<SpawnReply, SpawnError> {
        within("the pool's depth", depth.into(), MAX_POOL.into())?;
        self.check_engine(&shape)?;
        for number in self.pools.set_depth(shape, depth) {
            self.discard(number);
        }
        Ok(SpawnReply::Done)
    }

    fn check_engine(&self, shape: &Shape) -> Result<(), SpawnError> {
        let (wanted, have) = (shape.engine, self.settings.engine);
        if wanted == have {
            return Ok(());
        }
        Err(SpawnError::OtherEngine { wanted, have })
    }

    fn take(
        &mut self,
        client: u64,
        seq: u64,
        shape: Shape,
        ids: Vec<SandboxId>,
    ) -> Result<(), SpawnError> {
        within("the number of ids", ids.len() as u64, MAX_BATCH as u64)?;
        self.check_engine(&shape)?;
        for (at, id) in ids.iter().enumerate() {
            let pending = self.pending.iter().any(|take| take.ids.contains(id));
            if pending || self.live.contains_key(id) || ids[..at].contains(id) {
                return Err(SpawnError::Duplicate { id: id.clone() });
            }
        }
        let now = Instant::now();
        self.burst = Some(BurstOfTakes {
            first: self.burst.map_or(now, |burst| burst.first),
            last: now,
        });
        let mut take = PendingTake {
            client,
            seq,
            shape,
            got: Vec::with_capacity(ids.len()),
            ids,
        };
        while take.got.len() < take.ids.len() {
            let Some(number) = self.pools.take(&shape) else {
                break;
            };
            take.got.push((number, true));
        }
        for _ in take.got.len()..take.ids.len() {
            if let Err(error) = self.start(shape, false) {
                self.give_back(&take);
                return Err(error);
            }
        }
        if take.got.len() == take.ids.len() {
            self.hand_out(take);
        } else {
            self.pending.push_back(take);
        }
        Ok(())
    }

    /// Completes a take: the processes become live and their sockets go to the client.
    fn hand_out(&mut self, take: PendingTake) {
        let mut vms = Vec::with_capacity(take.ids.len());
        let mut sockets = Vec::with_capacity(take.ids.len());
        for (id, (number, pooled)) in take.ids.into_iter().zip(take.got) {
            let Some(entry) = self.processes.get_mut(&number) else {
                continue;
            };
            let Ok(socket) = entry.process.share_control() else {
                entry.process.kill();
                continue;
            };
            entry.state = State::Live(id.clone());
            self.live.insert(id.clone(), number);
            vms.push(Vm {
                id,
                pid: entry.process.pid(),
                shape: entry.shape,
                capabilities: entry.capabilities,
                pooled,
            });
            sockets.push(socket);
        }
        let reply = FromSpawn::Response {
            seq: take.seq,
            result: Ok(SpawnReply::Taken(vms)),
        };
        self.send(take.client, &reply, sockets);
    }

    fn give_back(&mut self, take: &PendingTake) {
        for (number, _) in &take.got {
            if self.pools.offer(&take.shape, *number).is_some() {
                self.discard(*number);
            }
        }
    }

    fn adopt(&mut self, client: u64, seq: u64, after: Option<&SandboxId>) {
        let mut vms = Vec::new();
        let mut sockets = Vec::new();
        let mut more = false;
        for (id, number) in &self.live {
            if after.is_some_and(|after| id <= after) {
                continue;
            }
            if vms.len() == MAX_BATCH {
                more = true;
                break;
            }
            let Some(entry) = self.processes.get(number) else {
                continue;
            };
            let Ok(socket) = entry.process.share_control() else {
                continue;
            };
            vms.push(Vm {
                id: id.clone(),
                pid: entry.process.pid(),
                shape: entry.shape,
                capabilities: entry.capabilities,
                pooled: false,
            });
            sockets.push(socket);
        }
        let result = Ok(SpawnReply::Adopted { vms, more });
        self.send(client, &FromSpawn::Response { seq, result }, sockets);
    }

    /// Answered by [`Self::process_ended`]: whoever is told "done" may use the id again.
    fn kill(&mut self, client: u64, seq: u64, id: &SandboxId) -> Result<(), SpawnError> {
        let entry = self
            .live
            .get(id)
            .and_then(|number| self.processes.get_mut(number))
            .ok_or_else(|| SpawnError::Unknown { id: id.clone() })?;
        entry.process.kill();
        entry.killers.push((client, seq));
        Ok(())
    }

    fn status(&self) -> SpawnStatus {
        SpawnStatus {
            pools: self.pools.status(),
            live: self.live.len() as u32,
            shells_lost: self.shells_lost,
        }
    }

    /// Starts what the pools lack.
    fn refill(&mut self) {
        if self
            .burst
            .is_some_and(|burst| burst.over_at() > Instant::now())
        {
            return;
        }
        self.burst = None;
        for shape in self.pools.start_making(Instant::now()) {
            if let Err(error) = self.start(shape, true) {
                crate::say(&format!("a pool cannot be filled: {error}"));
                self.pools.failed(&shape, Instant::now());
            }
        }
    }

    fn start(&mut self, shape: Shape, for_pool: bool) -> Result<(), SpawnError> {
        let failed = |reason: String| SpawnError::ShellFailed { reason };
        within(
            "the number of VMs",
            self.processes.len() as u64 + 1,
            self.settings.max_processes as u64,
        )?;
        let process = Process::start(&self.settings.vmm).map_err(|error| failed(chain(&error)))?;
        handshake::begin(process.control()).map_err(|error| failed(chain(&error)))?;
        let number = self.number();
        let watched = watch(
            &self.epoll,
            process.control().as_fd(),
            Token::Control(number),
        ) && watch(&self.epoll, process.pidfd(), Token::End(number));
        if !watched {
            return Err(failed("the new VMM process cannot be watched".to_owned()));
        }
        let state = State::Making {
            for_pool,
            progress: Progress::new(self.settings.engine),
        };
        self.processes.insert(
            number,
            Entry {
                process,
                shape,
                state,
                capabilities: Capabilities::empty(),
                killers: Vec::new(),
            },
        );
        Ok(())
    }

    /// The VMM in the making has said something.
    fn control_event(&mut self, number: u64) {
        let Some(entry) = self.processes.get_mut(&number) else {
            return;
        };
        let State::Making { progress, .. } = &mut entry.state else {
            return;
        };
        let mut buffer = vec![0; forkd_vmm_proto::MAX_MESSAGE];
        let message = match entry.process.control().recv(&mut buffer) {
            Ok(packet) => decode::<FromVmm>(&buffer[..packet.len]).map_err(|e| chain(&e)),
            Err(error) if would_block(&error) => return,
            Err(error) => Err(chain(&error)),
        };
        match message.and_then(|message| progress.advance(message)) {
            Ok(Progressed::Wait) => {}
            Ok(Progressed::Greeted) => {
                if let Err(error) = self.prepare(number) {
                    self.shell_failed(number, &chain(&error));
                }
            }
            Ok(Progressed::Ready(capabilities)) => self.shell_ready(number, capabilities),
            Err(reason) => self.shell_failed(number, &reason),
        }
    }

    /// Hands a VMM that has answered the hello what its shell is built from.
    fn prepare(&mut self, number: u64) -> Result<(), BeginError> {
        let kvm = match &self.kvm {
            Some(kvm) => kvm,
            None => {
                let opened = File::options().read(true).write(true).open("/dev/kvm");
                self.kvm.insert(opened.map_err(BeginError::Kvm)?.into())
            }
        };
        let Some(entry) = self.processes.get(&number) else {
            return Ok(());
        };
        let pagemap = entry.process.open_pagemap();
        if let Err(error) = &pagemap {
            crate::say(&format!(
                "cuts of a VM will hold more than changed: its page map cannot be opened: {error}"
            ));
        }
        let pagemap = pagemap.ok();
        handshake::prepare(
            entry.process.control(),
            entry.shape,
            kvm.as_fd(),
            pagemap.as_ref().map(AsFd::as_fd),
        )
    }

    fn shell_ready(&mut self, number: u64, capabilities: Capabilities) {
        let Some(entry) = self.processes.get_mut(&number) else {
            return;
        };
        let shape = entry.shape;
        entry.capabilities = capabilities;
        let was = std::mem::replace(&mut entry.state, State::Ready);
        let for_pool = matches!(was, State::Making { for_pool: true, .. });
        // From now on what the VMM says is for the controller to read.
        let _ = epoll::delete(&self.epoll, entry.process.control());
        if let Some(at) = self.pending.iter().position(|take| take.shape == shape) {
            if for_pool {
                self.pools.diverted(&shape);
            }
            self.pending[at].got.push((number, false));
            if self.pending[at].got.len() == self.pending[at].ids.len()
                && let Some(take) = self.pending.remove(at)
            {
                self.hand_out(take);
            }
            return;
        }
        if !capabilities.contains(Capability::PooledShells) {
            // The engine fills a VM as it makes it: there is nothing to keep ready.
            for ready in self.pools.set_depth(shape, 0) {
                self.discard(ready);
            }
        }
        let surplus = if for_pool {
            self.pools.made(&shape, number)
        } else {
            self.pools.offer(&shape, number)
        };
        if surplus.is_some() {
            self.discard(number);
        }
    }

    fn shell_failed(&mut self, number: u64, reason: &str) {
        let Some(entry) = self.processes.remove(&number) else {
            return;
        };
        self.shells_lost += 1;
        let State::Making { for_pool, .. } = entry.state else {
            return;
        };
        if for_pool {
            crate::say(&format!("a shell could not be made: {reason}"));
            return self.pools.failed(&entry.shape, Instant::now());
        }
        let Some(at) = self
            .pending
            .iter()
            .position(|take| take.shape == entry.shape)
        else {
            return;
        };
        let Some(take) = self.pending.remove(at) else {
            return;
        };
        self.give_back(&take);
        let result = Err(SpawnError::ShellFailed {
            reason: reason.to_owned(),
        });
        self.send(
            take.client,
            &FromSpawn::Response {
                seq: take.seq,
                result,
            },
            Vec::new(),
        );
    }

    fn process_ended(&mut self, number: u64) {
        let Some(entry) = self.processes.get_mut(&number) else {
            return;
        };
        let Some(how) = entry.process.reap() else {
            return;
        };
        match &entry.state {
            State::Making { .. } => self.shell_failed(number, &format!("the VMM ended: {how:?}")),
            State::Ready => {
                let shape = entry.shape;
                self.shells_lost += self.pools.remove(&shape, |ready| *ready == number) as u64;
                self.processes.remove(&number);
            }
            State::Live(id) => {
                let (id, pid) = (id.clone(), entry.process.pid());
                let killers = std::mem::take(&mut entry.killers);
                self.live.remove(&id);
                self.processes.remove(&number);
                for (client, seq) in killers {
                    let result = Ok(SpawnReply::Done);
                    self.send(client, &FromSpawn::Response { seq, result }, Vec::new());
                }
                self.tell_all(&id, pid, how);
            }
        }
    }

    fn tell_all(&mut self, id: &SandboxId, pid: u32, how: HowEnded) {
        let clients: Vec<u64> = self.clients.keys().copied().collect();
        for client in clients {
            self.send(
                client,
                &FromSpawn::Exited {
                    id: id.clone(),
                    pid,
                    how,
                },
                Vec::new(),
            );
        }
    }

    /// Ends a shell that is not wanted; its end is noticed and reaped like any other.
    fn discard(&mut self, number: u64) {
        if let Some(entry) = self.processes.get(&number) {
            entry.process.kill();
        }
    }

    fn send(&mut self, number: u64, message: &FromSpawn, sockets: Vec<OwnedFd>) {
        let Some(client) = self.clients.get_mut(&number) else {
            return;
        };
        client.queue(message, sockets);
        self.flush(number);
    }

    fn flush(&mut self, number: u64) {
        let Some(client) = self.clients.get_mut(&number) else {
            return;
        };
        let mut flags = epoll::EventFlags::IN;
        match client.flush() {
            Ok(true) => {}
            Ok(false) => flags |= epoll::EventFlags::OUT,
            Err(_) => return self.drop_client(number),
        }
        let _ = epoll::modify(
            &self.epoll,
            client.fd(),
            Token::Client(number).to_data(),
            flags,
        );
    }
}

fn watch(epoll: &OwnedFd, fd: BorrowedFd<'_>, token: Token) -> bool {
    epoll::add(epoll, fd, token.to_data(), epoll::EventFlags::IN).is_ok()
}

fn within(what: &str, value: u64, limit: u64) -> Result<(), SpawnError> {
    if value <= limit {
        return Ok(());
    }
    Err(SpawnError::OutOfRange {
        what: what.to_owned(),
        value,
        limit,
    })
}

fn until(at: Instant) -> rustix::event::Timespec {
    let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    rustix::event::Timespec {
        tv_sec: left.as_secs().cast_signed(),
        tv_nsec: left.subsec_nanos().into(),
    }
}

/// An error and its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
