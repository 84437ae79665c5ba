//! The control side of the broker: the socket of the controller, the links of engines, and the workers.
//!
//! The program survives its controller. A new controller connects, greets, and sets the rules of its sandboxes again.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use forkd_channel::{Channel, ChannelError};
use forkd_net_proto::broker::{
    Authority, BROKER_VERSION, BrokerCommand, BrokerError, BrokerReply, BrokerRequest,
    BrokeredFlow, FromBroker, WireValue,
};
use forkd_net_proto::{FdIndex, MAX_MESSAGE, NetWalls, decode, encode};
use forkd_types::SandboxId;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::net::{SocketFlags, accept_with};
use rustls::ClientConfig;
use zeroize::{Zeroize, Zeroizing};

use crate::authority::{self, Signer};
use crate::vault::Vault;
use crate::worker::{Job, Report, Shared, Worker};

const LISTENER: u64 = 0;
const NOTIFY: u64 = 1;
const FIRST_PEER: u64 = 2;
/// Controllers and engines that are connected at one time.
const MAX_PEERS: usize = 32;
/// Messages that wait for a controller that does not read.
const MAX_WAITING: usize = 1024;
const MAX_WORKERS: usize = 4;
/// How often the controller hears of refusals of one sandbox.
const NEWS: Duration = Duration::from_secs(1);
/// Sandboxes whose last news is remembered.
const MAX_TOLD: usize = 4096;

enum Peer {
    Controller {
        channel: Channel,
        greeted: bool,
        waiting: VecDeque<Zeroizing<Vec<u8>>>,
    },
    Engine(Channel),
}

struct WorkerHandle {
    jobs: Sender<Job>,
    wake: Arc<OwnedFd>,
}

/// The last news of a sandbox, and the refusals since then.
struct Told {
    at: Instant,
    suppressed: u64,
}

/// The broker of a host.
pub struct Program {
    epoll: OwnedFd,
    listener: OwnedFd,
    notify: Arc<OwnedFd>,
    reports: Receiver<Report>,
    workers: Vec<WorkerHandle>,
    /// Workers without a thread yet.
    idle: Vec<Worker>,
    next_worker: usize,
    shared: Arc<Shared>,
    authority: Option<Authority>,
    walls: NetWalls,
    peers: BTreeMap<u64, Peer>,
    next_peer: u64,
    told: HashMap<SandboxId, Told>,
}

impl Program {
    /// `client` are the settings by which upstreams are checked.
    pub fn new(listener: OwnedFd, client: Arc<ClientConfig>) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Arc::new);
        let notify = event()?;
        let token = epoll::EventData::new_u64;
        epoll::add(&epoll, &listener, token(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &notify, token(NOTIFY), epoll::EventFlags::IN)?;
        let shared = Arc::new(Shared::new(client));
        let (report, reports) = channel();
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let (mut workers, mut idle) = (Vec::new(), Vec::new());
        for _ in 0..count.min(MAX_WORKERS) {
            let (jobs, receiver) = channel();
            let wake = event()?;
            idle.push(Worker::new(
                receiver,
                Arc::clone(&wake),
                report.clone(),
                Arc::clone(&notify),
                Arc::clone(&shared),
            )?);
            workers.push(WorkerHandle { jobs, wake });
        }
        Ok(Self {
            epoll,
            listener,
            notify,
            reports,
            workers,
            idle,
            next_worker: 0,
            shared,
            authority: None,
            walls: NetWalls::default(),
            peers: BTreeMap::new(),
            next_peer: FIRST_PEER,
            told: HashMap::new(),
        })
    }

    /// Starts the threads of the workers. Every thread runs when this returns: the start of a thread needs system calls
    /// that the filter forbids.
    pub fn start(&mut self, walls: NetWalls) -> std::io::Result<()> {
        self.walls = walls;
        let (started, running) = channel();
        let count = self.idle.len();
        for (index, worker) in self.idle.drain(..).enumerate() {
            let started = started.clone();
            std::thread::Builder::new()
                .name(format!("broker-{index}"))
                .spawn(move || {
                    // The receiver waits for every thread.
                    let _ = started.send(());
                    worker.run();
                })?;
        }
        drop(started);
        match running.iter().take(count).count() == count {
            true => Ok(()),
            false => Err(std::io::Error::other("a worker ended at its start")),
        }
    }

    /// Serves until the kernel refuses to.
    pub fn run(&mut self) -> std::io::Result<()> {
        let mut events = Vec::with_capacity(64);
        // Messages hold values, so the buffer is overwritten at the end.
        let mut buffer = Zeroizing::new(vec![0; MAX_MESSAGE]);
        loop {
            events.clear();
            let room = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.epoll, room, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    NOTIFY => self.take_reports(),
                    peer => self.serve(peer, &mut buffer),
                }
            }
        }
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while let Ok(socket) = accept_with(&self.listener, flags) {
            let channel = Channel::from_fd(socket);
            self.admit(Peer::Controller {
                channel,
                greeted: false,
                waiting: VecDeque::new(),
            });
        }
    }

    /// Listens to a peer. False if there are too many.
    fn admit(&mut self, peer: Peer) -> bool {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        let token = epoll::EventData::new_u64(self.next_peer);
        let channel = match &peer {
            Peer::Controller { channel, .. } | Peer::Engine(channel) => channel,
        };
        if self.peers.len() >= MAX_PEERS || epoll::add(&self.epoll, channel, token, flags).is_err()
        {
            return false;
        }
        self.peers.insert(self.next_peer, peer);
        self.next_peer += 1;
        true
    }

    fn serve(&mut self, number: u64, buffer: &mut [u8]) {
        self.flush(number);
        while let Some(peer) = self.peers.get(&number) {
            let (channel, engine) = match peer {
                Peer::Controller { channel, .. } => (channel, false),
                Peer::Engine(channel) => (channel, true),
            };
            let received = match channel.recv(buffer) {
                Ok(received) => received,
                Err(ChannelError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return;
                }
                Err(_) => {
                    self.peers.remove(&number);
                    return;
                }
            };
            let bytes = buffer.get_mut(..received.len).unwrap_or_default();
            let fine = match engine {
                true => self.flow(bytes, received.fds),
                false => self.request(number, bytes, received.fds),
            };
            buffer.get_mut(..received.len).unwrap_or_default().zeroize();
            if !fine {
                self.peers.remove(&number);
            }
        }
    }

    /// Gives a connection to a worker. False if the engine does not keep to the protocol.
    fn flow(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> bool {
        let (Ok(wish), Ok([guest, upstream])) =
            (decode::<BrokeredFlow>(bytes), <[OwnedFd; 2]>::try_from(fds))
        else {
            return false;
        };
        let worker = self.next_worker % self.workers.len().max(1);
        self.next_worker = self.next_worker.wrapping_add(1);
        if let Some(worker) = self.workers.get(worker) {
            // A worker ends with the program only.
            let _ = worker.jobs.send(Job {
                wish,
                guest,
                upstream,
            });
            let _ = rustix::io::write(&*worker.wake, &1u64.to_ne_bytes());
        }
        true
    }

    fn request(&mut self, number: u64, bytes: &[u8], fds: Vec<OwnedFd>) -> bool {
        let Ok(BrokerRequest { seq, command }) = decode::<BrokerRequest>(bytes) else {
            return false;
        };
        let result = self.command(number, command, fds);
        self.queue(number, &FromBroker::Response { seq, result });
        true
    }

    fn command(
        &mut self,
        number: u64,
        command: BrokerCommand,
        fds: Vec<OwnedFd>,
    ) -> Result<BrokerReply, BrokerError> {
        let Some(Peer::Controller { greeted, .. }) = self.peers.get_mut(&number) else {
            return Err(BrokerError::NoHello);
        };
        if let BrokerCommand::Hello { version } = command {
            *greeted = version == BROKER_VERSION;
            return self.hello(version);
        }
        if !*greeted {
            return Err(BrokerError::NoHello);
        }
        match command {
            BrokerCommand::Hello { .. } => {}
            BrokerCommand::Authority { kept } => return self.set_authority(kept),
            BrokerCommand::Engine { link } => return self.engine(link, fds),
            BrokerCommand::SetSecret {
                owner,
                name,
                value: WireValue(value),
            } => self.vault(|vault| vault.set_value(owner, name, value)),
            BrokerCommand::RemoveSecret { owner, name } => {
                self.vault(|vault| vault.remove_value(owner, name));
            }
            BrokerCommand::SetRules { id, owner, rules } => {
                self.vault(|vault| vault.set_rules(id, owner, rules));
            }
            BrokerCommand::List { after } => {
                return Ok(self.vault(|vault| vault.list(after.as_ref())));
            }
            BrokerCommand::Totals => return Ok(BrokerReply::Totals(self.shared.counters())),
        }
        Ok(BrokerReply::Done)
    }

    fn vault<T>(&self, work: impl FnOnce(&mut Vault) -> T) -> T {
        let mut vault = self
            .shared
            .vault
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        work(&mut vault)
    }

    fn hello(&self, version: u32) -> Result<BrokerReply, BrokerError> {
        if version != BROKER_VERSION {
            return Err(BrokerError::Version {
                ours: BROKER_VERSION,
                theirs: version,
            });
        }
        Ok(BrokerReply::Hello {
            version: BROKER_VERSION,
            program: concat!("forkd-broker ", env!("CARGO_PKG_VERSION")).to_owned(),
            walls: self.walls.clone(),
            certificate: self.authority.as_ref().map(|own| own.certificate.clone()),
        })
    }

    fn set_authority(&mut self, kept: Option<Authority>) -> Result<BrokerReply, BrokerError> {
        if self.authority.is_none() {
            let authority = match kept {
                Some(kept) => kept,
                None => authority::make().map_err(|_| BrokerError::Authority)?,
            };
            let signer = Signer::new(&authority).map_err(|_| BrokerError::Authority)?;
            let mut place = self
                .shared
                .signer
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            *place = Some(signer);
            self.authority = Some(authority);
        }
        let authority = self.authority.clone().ok_or(BrokerError::Authority)?;
        Ok(BrokerReply::Authority(authority))
    }

    fn engine(&mut self, link: FdIndex, fds: Vec<OwnedFd>) -> Result<BrokerReply, BrokerError> {
        let fd = fds.into_iter().nth(usize::from(link.0));
        let fd = fd.ok_or(BrokerError::NoDescriptor)?;
        rustix::io::ioctl_fionbio(&fd, true).map_err(|_| BrokerError::Socket)?;
        match self.admit(Peer::Engine(Channel::from_fd(fd))) {
            true => Ok(BrokerReply::Done),
            false => Err(BrokerError::Socket),
        }
    }

    fn take_reports(&mut self) {
        let _ = rustix::io::read(&*self.notify, &mut [0u8; 8]);
        while let Ok(Report { wish, reason }) = self.reports.try_recv() {
            let Some(suppressed) = self.may_tell(&wish.id) else {
                continue;
            };
            let news = FromBroker::Refused {
                id: wish.id,
                to: wish.to,
                reason,
                suppressed,
            };
            let peers = self.peers.iter();
            let controllers = peers.filter(|(_, peer)| matches!(peer, Peer::Controller { .. }));
            let controllers: Vec<u64> = controllers.map(|(number, _)| *number).collect();
            for number in controllers {
                self.queue(number, &news);
            }
        }
    }

    /// The refusals of a sandbox that had no news, if it may have news now.
    fn may_tell(&mut self, id: &SandboxId) -> Option<u64> {
        let now = Instant::now();
        if self.told.len() >= MAX_TOLD {
            self.told
                .retain(|_, told| now.saturating_duration_since(told.at) < NEWS);
        }
        match self.told.get_mut(id) {
            Some(told) if now.saturating_duration_since(told.at) < NEWS => {
                told.suppressed += 1;
                None
            }
            Some(told) => {
                told.at = now;
                Some(std::mem::take(&mut told.suppressed))
            }
            None => {
                let told = Told {
                    at: now,
                    suppressed: 0,
                };
                self.told.insert(id.clone(), told);
                Some(0)
            }
        }
    }

    fn queue(&mut self, number: u64, message: &FromBroker) {
        let (Some(Peer::Controller { waiting, .. }), Ok(bytes)) =
            (self.peers.get_mut(&number), encode(message))
        else {
            return;
        };
        if waiting.len() >= MAX_WAITING {
            self.peers.remove(&number);
            return;
        }
        waiting.push_back(Zeroizing::new(bytes));
        self.flush(number);
    }

    fn flush(&mut self, number: u64) {
        let Some(Peer::Controller {
            channel, waiting, ..
        }) = self.peers.get_mut(&number)
        else {
            return;
        };
        while let Some(bytes) = waiting.front() {
            match forkd_channel::send(channel.as_fd(), bytes, &[]) {
                Ok(()) => {
                    waiting.pop_front();
                }
                Err(ChannelError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return;
                }
                Err(_) => {
                    self.peers.remove(&number);
                    return;
                }
            }
        }
    }
}
