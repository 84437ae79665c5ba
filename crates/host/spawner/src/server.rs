//! The loop: clients, processes and pools on one epoll descriptor.
//!
//! ```text
//!   start ──► making ──Hello, Prepare answered──► ready (in a pool) ──Take──► live ──► ended
//!                └──────────── a Take is waiting ────────────────────────────►┘
//! ```
//!
//! Every process is in exactly one of these states, and every state ends when its pidfd says so.

mod kept;
mod shells;
mod vms;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use forkd_types::{Digest, SandboxId};
use forkd_vmm_proto::spawn::{
    FromSpawn, HowEnded, Limits, MAX_POOL, SPAWN_VERSION, SpawnCommand, SpawnError, SpawnReply,
    SpawnRequest, SpawnStatus,
};
use forkd_vmm_proto::{Capabilities, Shape};
use rustix::event::epoll;

use crate::cgroup::{Cgroups, Leaf};
use crate::client::{Client, Received};
use crate::engines::{Engines, VmFolder};
use crate::handshake::Progress;
use crate::jail::{Jails, VmUser};
use crate::pool::Pools;
use crate::process::Process;

/// The most controllers connected at one time: one that works, one that takes over, and a few that look.
const MAX_CLIENTS: usize = 16;

/// Pools are refilled this long after the controller has set their depth, which it does when the children of a burst are
/// ready: making shells would compete with the children, and with their first requests.
const QUIET: Duration = Duration::from_millis(200);
/// A controller that does not set a depth holds refilling up for this long after its last take.
const SILENT_CONTROLLER: Duration = Duration::from_secs(3);
/// Takes that never pause do not hold refilling up for longer than this.
const LONGEST_HOLD: Duration = Duration::from_secs(5);

/// How soon a cgroup that is not empty yet is looked at again.
const LOOK_AT_GRAVES: Duration = Duration::from_millis(5);
/// Threads and processes of a VMM beside its vCPUs: control, devices, a writer, and some room.
const THREADS: u32 = 16;

/// Settings from the command line.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The programs that run VMs.
    pub engines: Engines,
    /// How many shells are made for the pools at one time.
    pub parallel: u32,
    /// The most processes there may be.
    pub max_processes: usize,
}

/// The meaning of the number in an epoll event.
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
    /// The cgroup of the VM, where there are cgroups.
    leaf: Option<Leaf>,
    /// The user ID of the VMM, where VMMs have users of their own.
    user: Option<VmUser>,
    /// The folder of the VM, where its engine needs one. It goes with the process.
    _folder: Option<VmFolder>,
    /// Client and number of each request that waits for its end.
    killers: Vec<(u64, u64)>,
}

#[derive(Debug)]
enum State {
    Making { for_pool: bool, progress: Progress },
    Ready,
    Live(SandboxId),
}

/// A cgroup whose VMM has ended and that the kernel has not emptied yet.
#[derive(Debug)]
struct Grave {
    leaf: Leaf,
    /// Client and number of each request that waits for its end.
    killers: Vec<(u64, u64)>,
}

/// A `Take` that waits for shells.
#[derive(Debug)]
struct PendingTake {
    client: u64,
    seq: u64,
    shape: Shape,
    ids: Vec<SandboxId>,
    limits: Limits,
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
    /// The cgroups of VMs, or why there are none.
    cgroups: Result<Cgroups, String>,
    jails: Jails,
    graves: Vec<Grave>,
    clients: HashMap<u64, Client>,
    processes: HashMap<u64, Entry>,
    live: BTreeMap<SandboxId, u64>,
    pools: Pools<u64>,
    /// Descriptors that controllers left for their successors.
    kept: BTreeMap<Digest, OwnedFd>,
    pending: VecDeque<PendingTake>,
    shells_lost: u64,
    burst: Option<BurstOfTakes>,
    next: u64,
}

/// Takes whose children are not known to be ready yet.
#[derive(Debug, Clone, Copy)]
struct BurstOfTakes {
    first: Instant,
    last: Instant,
    /// When the controller set the depth of a pool after the last take.
    released: Option<Instant>,
}

impl BurstOfTakes {
    /// The burst after one more take.
    fn with_take(burst: Option<Self>, now: Instant) -> Self {
        Self {
            first: burst.map_or(now, |burst| burst.first),
            last: now,
            released: None,
        }
    }

    fn over_at(self) -> Instant {
        let over = match self.released {
            Some(released) => released + QUIET,
            None => self.last + SILENT_CONTROLLER,
        };
        over.min(self.first + LONGEST_HOLD)
    }
}

impl Server {
    /// A server on a listening `SOCK_SEQPACKET` socket. `cgroups` is what [`Cgroups::open`] gave: leaves that an earlier
    /// process left are removed once they are empty.
    pub fn new(
        settings: Settings,
        listener: OwnedFd,
        cgroups: std::io::Result<(Cgroups, Vec<Leaf>)>,
        jails: Jails,
    ) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            &listener,
            Token::Listener.to_data(),
            epoll::EventFlags::IN,
        )?;
        let pools = Pools::new(settings.parallel);
        let (cgroups, left) = match cgroups {
            Ok((cgroups, left)) => (Ok(cgroups), left),
            Err(error) => {
                crate::say(&format!("VMs have no cgroup and no limits: {error}"));
                (Err(error.to_string()), Vec::new())
            }
        };
        let graves = left
            .into_iter()
            .map(|leaf| Grave {
                leaf,
                killers: Vec::new(),
            })
            .collect();
        Ok(Self {
            settings,
            epoll,
            listener,
            kvm: None,
            cgroups,
            jails,
            graves,
            clients: HashMap::new(),
            processes: HashMap::new(),
            live: BTreeMap::new(),
            kept: BTreeMap::new(),
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
            self.empty_graves();
            events.clear();
            let wake = self.burst.map(BurstOfTakes::over_at);
            let look = (!self.graves.is_empty()).then(|| Instant::now() + LOOK_AT_GRAVES);
            let timeout = wake
                .into_iter()
                .chain(self.pools.next_attempt())
                .chain(look)
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
                Received::Message(request, fds) => self.request(number, request, fds),
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

    fn request(&mut self, client: u64, request: SpawnRequest, fds: Vec<OwnedFd>) {
        let greeted = self.clients.get(&client).is_some_and(|c| c.greeted);
        let seq = request.seq;
        let result = match request.command {
            SpawnCommand::Hello { version } => self.hello(client, version),
            _ if !greeted => Err(SpawnError::NoHello),
            SpawnCommand::SetPool { shape, depth } => self.set_pool(shape, depth),
            SpawnCommand::Take {
                shape,
                ids,
                limits,
                jail,
            } => match self.take(client, seq, shape, ids, limits, jail) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            SpawnCommand::SetLimits { id, limits } => self.set_limits(&id, &limits),
            SpawnCommand::Adopt { after } => return self.adopt(client, seq, after.as_ref()),
            SpawnCommand::Kill { id } => match self.kill(client, seq, &id) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            SpawnCommand::Status => Ok(SpawnReply::Status(self.status())),
            SpawnCommand::Keep { names } => self.keep(names, fds),
            SpawnCommand::Release { names } => Ok(self.release(&names)),
            SpawnCommand::Kept { after } => return self.kept(client, seq, after.as_ref()),
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
            engines: self.settings.engines.names(),
            walls: self.walls(),
            missing: self.missing_walls(),
        })
    }

    fn set_pool(&mut self, shape: Shape, depth: u32) -> Result<SpawnReply, SpawnError> {
        within("the pool's depth", depth.into(), MAX_POOL.into())?;
        self.settings.engines.get(shape.engine)?;
        if let Some(burst) = &mut self.burst {
            burst.released.get_or_insert_with(Instant::now);
        }
        for number in self.pools.set_depth(shape, depth) {
            self.discard(number);
        }
        Ok(SpawnReply::Done)
    }

    fn status(&self) -> SpawnStatus {
        SpawnStatus {
            pools: self.pools.status(),
            live: self.live.len() as u32,
            shells_lost: self.shells_lost,
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

/// The descriptors of a VM for the controller: control socket and pidfd.
fn share(process: &Process) -> std::io::Result<[OwnedFd; 2]> {
    Ok([process.share_control()?, process.share_pidfd()?])
}

/// Kills a VM; its end is noticed like any other.
fn end(entry: &Entry) {
    entry.process.kill();
    if let Some(leaf) = &entry.leaf {
        leaf.kill();
    }
}

/// The threads and processes that a VMM of this shape needs.
fn threads(shape: &Shape) -> u32 {
    u32::from(shape.vcpus) + THREADS
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_refilled_when_the_children_of_a_burst_are_ready() {
        let start = Instant::now();
        let ms = |count| start + Duration::from_millis(count);
        let burst = BurstOfTakes::with_take(None, ms(0));
        let mut burst = BurstOfTakes::with_take(Some(burst), ms(10));
        assert_eq!(burst.over_at(), ms(10) + SILENT_CONTROLLER);
        burst.released = Some(ms(60));
        assert_eq!(burst.over_at(), ms(60) + QUIET);
        // Another take: its child is not ready.
        let burst = BurstOfTakes::with_take(Some(burst), ms(70));
        assert_eq!(burst.over_at(), ms(70) + SILENT_CONTROLLER);
        let late = BurstOfTakes::with_take(Some(burst), ms(4_900));
        assert_eq!(late.over_at(), start + LONGEST_HOLD);
    }
}
