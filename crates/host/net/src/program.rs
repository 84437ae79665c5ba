//! The control side of the engine: the socket of the controller, and the workers.
//!
//! The program survives its controller. A new controller connects, greets, and finds the sandboxes as they are.

pub mod resolvers;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use forkd_channel::{Channel, ChannelError};
use forkd_net_proto::{
    FdIndex, FromNet, MAX_IDS, MAX_MESSAGE, NET_VERSION, NetCommand, NetCounters, NetError,
    NetReply, NetRequest, NetWalls, decode, encode,
};
use forkd_types::{Rule, SandboxId};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::net::{SocketFlags, accept_with, sockopt};

use crate::worker::{Job, Report, Ticket, Worker};

const LISTENER: u64 = 0;
const NOTIFY: u64 = 1;
const FIRST_CLIENT: u64 = 2;
/// Controllers that are connected at one time: one that works, one that takes over, and a few that look.
const MAX_CLIENTS: usize = 16;
/// Messages that wait for a controller that does not read.
const MAX_WAITING: usize = 4096;
/// Of these, news that may be missed.
const MAX_NEWS: usize = 64;
const MAX_WORKERS: usize = 8;
/// The buffer of each frame socket: it bounds the kernel memory of a sandbox.
const FRAME_BUFFER: usize = 1 << 20;
/// How long all workers together may take for an answer.
const WORKERS_TIME: Duration = Duration::from_secs(1);

struct Client {
    channel: Channel,
    greeted: bool,
    waiting: VecDeque<Vec<u8>>,
}

struct WorkerHandle {
    jobs: Sender<Job>,
    wake: Arc<OwnedFd>,
}

/// Where a sandbox is served.
struct Attached {
    worker: usize,
    attachment: u64,
}

/// The engine of a host.
pub struct Program {
    epoll: OwnedFd,
    listener: OwnedFd,
    notify: Arc<OwnedFd>,
    reports: Receiver<Report>,
    workers: Vec<WorkerHandle>,
    /// Workers without a thread yet.
    idle: Vec<Worker>,
    walls: NetWalls,
    clients: BTreeMap<u64, Client>,
    next_client: u64,
    sandboxes: BTreeMap<SandboxId, Attached>,
    attachments: u64,
    resolvers: Vec<SocketAddr>,
}

impl Program {
    /// Opens the files of the host that the engine needs. `resolvers` replaces the name servers of the host if it is not
    /// empty.
    pub fn new(listener: OwnedFd, resolvers: Vec<SocketAddr>) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Arc::new);
        let notify = event()?;
        epoll::add(
            &epoll,
            &listener,
            epoll::EventData::new_u64(LISTENER),
            epoll::EventFlags::IN,
        )?;
        epoll::add(
            &epoll,
            &notify,
            epoll::EventData::new_u64(NOTIFY),
            epoll::EventFlags::IN,
        )?;
        let (report, reports) = channel();
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let (mut workers, mut idle) = (Vec::new(), Vec::new());
        for _ in 0..count.min(MAX_WORKERS) {
            let (jobs, receiver) = channel();
            let wake = event()?;
            let worker = Worker::new(
                receiver,
                Arc::clone(&wake),
                report.clone(),
                Arc::clone(&notify),
                resolvers.clone(),
            )?;
            idle.push(worker);
            workers.push(WorkerHandle { jobs, wake });
        }
        Ok(Self {
            epoll,
            listener,
            notify,
            reports,
            workers,
            idle,
            walls: NetWalls::default(),
            clients: BTreeMap::new(),
            next_client: FIRST_CLIENT,
            sandboxes: BTreeMap::new(),
            attachments: 0,
            resolvers,
        })
    }

    /// Starts the threads of the workers. `walls` are those that stand around this process.
    ///
    /// Every thread runs when this returns: the start of a thread needs system calls that the filter forbids.
    pub fn start(&mut self, walls: NetWalls) -> std::io::Result<()> {
        self.walls = walls;
        let (started, running) = channel();
        let count = self.idle.len();
        for (index, worker) in self.idle.drain(..).enumerate() {
            let started = started.clone();
            std::thread::Builder::new()
                .name(format!("net-{index}"))
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
        loop {
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                None,
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    NOTIFY => self.take_reports(),
                    client => self.serve(client),
                }
            }
        }
    }

    fn accept(&mut self) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        while let Ok(socket) = accept_with(&self.listener, flags) {
            if self.clients.len() >= MAX_CLIENTS {
                continue;
            }
            let client = self.next_client;
            let channel = Channel::from_fd(socket);
            let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
            if epoll::add(
                &self.epoll,
                &channel,
                epoll::EventData::new_u64(client),
                flags,
            )
            .is_ok()
            {
                self.next_client += 1;
                self.clients.insert(
                    client,
                    Client {
                        channel,
                        greeted: false,
                        waiting: VecDeque::new(),
                    },
                );
            }
        }
    }

    fn serve(&mut self, client: u64) {
        let mut buffer = vec![0; MAX_MESSAGE];
        self.flush(client);
        while let Some(from) = self.clients.get(&client) {
            let received = match from.channel.recv(&mut buffer) {
                Ok(received) => received,
                Err(ChannelError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return;
                }
                Err(_) => {
                    self.clients.remove(&client);
                    return;
                }
            };
            let Ok(request) = decode::<NetRequest>(buffer.get(..received.len).unwrap_or_default())
            else {
                self.clients.remove(&client);
                return;
            };
            let ticket = Ticket {
                client,
                seq: request.seq,
            };
            if let Some(result) = self.command(ticket, request.command, received.fds) {
                self.answer(ticket, result);
            }
        }
    }

    /// The answer, or `None` if a worker gives it.
    fn command(
        &mut self,
        ticket: Ticket,
        command: NetCommand,
        fds: Vec<OwnedFd>,
    ) -> Option<Result<NetReply, NetError>> {
        let client = self.clients.get_mut(&ticket.client)?;
        if let NetCommand::Hello { version } = command {
            client.greeted = version == NET_VERSION;
            return Some(self.hello(version));
        }
        if !client.greeted {
            return Some(Err(NetError::NoHello));
        }
        match command {
            NetCommand::Attach {
                id,
                policy,
                brokered,
                generation,
                frames,
            } => {
                let Some(frames) = fds.into_iter().nth(usize::from(frames.0)) else {
                    return Some(Err(NetError::NoDescriptor));
                };
                let _ = sockopt::set_socket_send_buffer_size(&frames, FRAME_BUFFER);
                self.attachments += 1;
                let attachment = self.attachments;
                let worker = match self.sandboxes.get(&id) {
                    Some(attached) => attached.worker,
                    None => self.sandboxes.len() % self.workers.len(),
                };
                self.sandboxes
                    .insert(id.clone(), Attached { worker, attachment });
                self.give(
                    worker,
                    Job::Attach {
                        ticket,
                        id,
                        attachment,
                        policy,
                        brokered,
                        generation,
                        frames,
                    },
                );
                None
            }
            NetCommand::List { after } => Some(Ok(self.list(after.as_ref()))),
            NetCommand::Totals => Some(Ok(self.totals())),
            NetCommand::Configure { floor, resolvers } => {
                Some(Ok(self.configure(floor.into(), &resolvers)))
            }
            NetCommand::SetBroker { link } => Some(self.set_broker(link, fds)),
            command => {
                let id = command.sandbox()?.clone();
                let Some(attached) = self.sandboxes.get(&id) else {
                    return Some(match command {
                        NetCommand::Detach { .. } => Ok(NetReply::Done),
                        _ => Err(NetError::Unknown { id }),
                    });
                };
                let worker = attached.worker;
                if let NetCommand::Detach { .. } = command {
                    self.sandboxes.remove(&id);
                }
                self.give(worker, Job::Command { ticket, command });
                None
            }
        }
    }

    fn hello(&self, version: u32) -> Result<NetReply, NetError> {
        if version != NET_VERSION {
            return Err(NetError::Version {
                ours: NET_VERSION,
                theirs: version,
            });
        }
        let resolvers = match self.resolvers.is_empty() {
            true => resolvers::read_resolvers().unwrap_or_default(),
            false => self.resolvers.clone(),
        };
        Ok(NetReply::Hello {
            version: NET_VERSION,
            program: concat!("forkd-net ", env!("CARGO_PKG_VERSION")).to_owned(),
            resolvers: resolvers.iter().map(SocketAddr::ip).collect(),
            walls: self.walls.clone(),
        })
    }

    fn list(&self, after: Option<&SandboxId>) -> NetReply {
        use std::ops::Bound;
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut ids = self
            .sandboxes
            .range::<SandboxId, _>((start, Bound::Unbounded));
        let listed = ids
            .by_ref()
            .take(MAX_IDS)
            .map(|(id, _)| id.clone())
            .collect();
        NetReply::List {
            ids: listed,
            more: ids.next().is_some(),
        }
    }

    fn totals(&self) -> NetReply {
        let (sender, receiver) = channel();
        for index in 0..self.workers.len() {
            self.give(index, Job::Totals(sender.clone()));
        }
        drop(sender);
        let mut counters = NetCounters::default();
        for _ in &self.workers {
            if let Ok(part) = receiver.recv_timeout(WORKERS_TIME) {
                counters.add(&part);
            }
        }
        NetReply::Totals {
            counters,
            sandboxes: u32::try_from(self.sandboxes.len()).unwrap_or(u32::MAX),
        }
    }

    /// Gives the settings of the operator to every worker and waits until they are in force.
    fn configure(&self, floor: Arc<[Rule]>, resolvers: &[SocketAddr]) -> NetReply {
        let resolvers = match resolvers {
            [] => self.resolvers.clone(),
            given => given.to_vec(),
        };
        let (done, receiver) = channel();
        for index in 0..self.workers.len() {
            let job = Job::Configure {
                floor: Arc::clone(&floor),
                resolvers: resolvers.clone(),
                done: done.clone(),
            };
            self.give(index, job);
        }
        drop(done);
        self.wait_for_workers(&receiver);
        NetReply::Done
    }

    /// Gives every worker the link to the broker and waits until they use it.
    fn set_broker(&self, link: FdIndex, fds: Vec<OwnedFd>) -> Result<NetReply, NetError> {
        let link = fds.into_iter().nth(usize::from(link.0));
        let link = link.ok_or(NetError::NoDescriptor)?;
        rustix::io::ioctl_fionbio(&link, true).map_err(|error| NetError::Socket {
            reason: error.to_string(),
        })?;
        let link = Arc::new(link);
        let (done, receiver) = channel();
        for index in 0..self.workers.len() {
            let (link, done) = (Arc::clone(&link), done.clone());
            self.give(index, Job::SetBroker { link, done });
        }
        drop(done);
        self.wait_for_workers(&receiver);
        Ok(NetReply::Done)
    }

    /// A worker that is busy gets to a setting before it gets to later commands.
    fn wait_for_workers(&self, receiver: &Receiver<()>) {
        for _ in &self.workers {
            let _ = receiver.recv_timeout(WORKERS_TIME);
        }
    }

    fn give(&self, worker: usize, job: Job) {
        if let Some(worker) = self.workers.get(worker) {
            // A worker ends with the program only.
            let _ = worker.jobs.send(job);
            let _ = rustix::io::write(&*worker.wake, &1u64.to_ne_bytes());
        }
    }

    fn take_reports(&mut self) {
        let _ = rustix::io::read(&*self.notify, &mut [0u8; 8]);
        while let Ok(report) = self.reports.try_recv() {
            match report {
                Report::Answer { ticket, result } => self.answer(ticket, result),
                Report::Denied { id, notice } => self.announce(&FromNet::Denied {
                    id,
                    flow: notice.flow,
                    suppressed: notice.suppressed,
                }),
                Report::Ended {
                    id,
                    attachment,
                    why,
                } => {
                    // A later attachment of the same sandbox lives.
                    if self
                        .sandboxes
                        .get(&id)
                        .is_some_and(|own| own.attachment == attachment)
                    {
                        self.sandboxes.remove(&id);
                        let clients: Vec<u64> = self.clients.keys().copied().collect();
                        for client in clients {
                            self.queue(
                                client,
                                &FromNet::Ended {
                                    id: id.clone(),
                                    why: why.clone(),
                                },
                            );
                        }
                    }
                }
            }
        }
    }

    /// Sends news that a client may miss: one that does not read gets no more of them.
    fn announce(&mut self, message: &FromNet) {
        let listens = |client: &Client| client.waiting.len() < MAX_NEWS;
        let clients = self.clients.iter().filter(|(_, client)| listens(client));
        let clients: Vec<u64> = clients.map(|(number, _)| *number).collect();
        for client in clients {
            self.queue(client, message);
        }
    }

    fn answer(&mut self, ticket: Ticket, result: Result<NetReply, NetError>) {
        let seq = ticket.seq;
        self.queue(ticket.client, &FromNet::Response { seq, result });
    }

    fn queue(&mut self, client: u64, message: &FromNet) {
        let (Some(to), Ok(bytes)) = (self.clients.get_mut(&client), encode(message)) else {
            return;
        };
        if to.waiting.len() >= MAX_WAITING {
            self.clients.remove(&client);
            return;
        }
        to.waiting.push_back(bytes);
        self.flush(client);
    }

    fn flush(&mut self, client: u64) {
        let Some(to) = self.clients.get_mut(&client) else {
            return;
        };
        while let Some(bytes) = to.waiting.front() {
            match forkd_channel::send(to.channel.as_fd(), bytes, &[]) {
                Ok(()) => {
                    to.waiting.pop_front();
                }
                Err(ChannelError::Io(error)) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    return;
                }
                Err(_) => {
                    self.clients.remove(&client);
                    return;
                }
            }
        }
    }
}
