//! One thread that serves a share of the sandboxes.
//!
//! The program sends [`Job`]s; the worker answers with [`Report`]s. Everything that runs for one sandbox runs inside
//! [`guarded`]: a panic there ends the network of that sandbox and nothing else.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use forkd_net_proto::{EndCause, NetCommand, NetCounters, NetError, NetReply};
use forkd_types::{HostPort, Policy, Rule, SandboxId};
use rustix::event::{Timespec, epoll};

use crate::host_addresses::{HostAddresses, HostTables};
use crate::program::resolvers::read_resolvers;
use crate::sandbox::{After, Context, FRAMES, Notice, Sandbox};
use crate::wire;

/// The token of the descriptor that announces jobs.
const WAKE: u64 = u64::MAX;
/// How often time-outs are looked at while a host socket is open.
const TICK: Duration = Duration::from_millis(100);
/// How old the addresses and name servers of the host may be.
const REFRESH: Duration = Duration::from_secs(2);
const MAX_EVENTS: usize = 256;
/// Sandboxes on which the engine failed and that were not attached again.
const MAX_SPENT: usize = 4096;

/// Work for a worker.
pub enum Job {
    Attach {
        ticket: Ticket,
        id: SandboxId,
        /// Tells this attachment from earlier ones of the same sandbox.
        attachment: u64,
        policy: Policy,
        brokered: Vec<HostPort>,
        generation: u64,
        frames: OwnedFd,
    },
    Command {
        ticket: Ticket,
        command: NetCommand,
    },
    /// The settings of the operator; the answer comes when they are in force.
    Configure {
        floor: Arc<[Rule]>,
        resolvers: Vec<SocketAddr>,
        done: Sender<()>,
    },
    /// The sum of all counters.
    Totals(Sender<NetCounters>),
    /// The broker for flows from now on.
    SetBroker {
        link: Arc<OwnedFd>,
        done: Sender<()>,
    },
}

/// Who asked, and under which number.
#[derive(Debug, Clone, Copy)]
pub struct Ticket {
    pub client: u64,
    pub seq: u64,
}

/// Word from a worker.
pub enum Report {
    Answer {
        ticket: Ticket,
        result: Result<NetReply, NetError>,
    },
    Ended {
        id: SandboxId,
        attachment: u64,
        why: EndCause,
    },
    Denied {
        id: SandboxId,
        notice: Notice,
    },
}

/// A sandbox and its place.
struct Served {
    id: SandboxId,
    attachment: u64,
    sandbox: Sandbox,
    busy: bool,
}

pub struct Worker {
    epoll: OwnedFd,
    jobs: Receiver<Job>,
    wake: Arc<OwnedFd>,
    reports: Sender<Report>,
    /// Wakes the program.
    notify: Arc<OwnedFd>,
    served: Vec<Option<Served>>,
    places: HashMap<SandboxId, u32>,
    /// Sandboxes with work or timers: an idle one costs a turn nothing.
    active: BTreeSet<u32>,
    /// Counters of sandboxes that ended.
    past: NetCounters,
    /// Bytes that sandboxes had sent when the engine failed on them: a failure must not renew a limit.
    spent: HashMap<SandboxId, u64>,
    tables: HostTables,
    host: HostAddresses,
    /// Name servers of the operator; without any, those of the host are read.
    fixed_resolvers: Vec<SocketAddr>,
    resolvers: Vec<SocketAddr>,
    floor: Arc<[Rule]>,
    broker: Option<Arc<OwnedFd>>,
    refreshed: Instant,
    ticked: Instant,
    buffer: Vec<u8>,
}

impl Worker {
    pub fn new(
        jobs: Receiver<Job>,
        wake: Arc<OwnedFd>,
        reports: Sender<Report>,
        notify: Arc<OwnedFd>,
        fixed_resolvers: Vec<SocketAddr>,
    ) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            &wake,
            epoll::EventData::new_u64(WAKE),
            epoll::EventFlags::IN,
        )?;
        let now = Instant::now();
        let mut worker = Self {
            epoll,
            jobs,
            wake,
            reports,
            notify,
            served: Vec::new(),
            places: HashMap::new(),
            active: BTreeSet::new(),
            past: NetCounters::default(),
            spent: HashMap::new(),
            tables: HostTables::open()?,
            host: HostAddresses::default(),
            fixed_resolvers,
            resolvers: Vec::new(),
            floor: Arc::new([]),
            broker: None,
            refreshed: now,
            ticked: now,
            buffer: Vec::with_capacity(wire::MAX_FRAME),
        };
        worker.refresh(now)?;
        Ok(worker)
    }

    /// Serves until the program ends.
    pub fn run(mut self) {
        let mut events = Vec::with_capacity(MAX_EVENTS);
        loop {
            events.clear();
            let waited = epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                self.timeout(Instant::now()).as_ref(),
            );
            if waited.is_err() {
                events.clear();
            }
            let now = Instant::now();
            if now.saturating_duration_since(self.refreshed) > REFRESH {
                // Without the tables the last known addresses and name servers stay in force.
                let _ = self.refresh(now);
            }
            for event in &events {
                let token = event.data.u64();
                if token == WAKE {
                    let _ = rustix::io::read(&*self.wake, &mut [0u8; 8]);
                    continue;
                }
                let (place, slot) = ((token >> 32) as u32, token as u32);
                let flags = event.flags;
                self.guarded(place, now, |sandbox, cx| sandbox.on_ready(slot, flags, cx));
            }
            self.go_on(now);
            self.tick(now);
            if !self.take_jobs(now) {
                return;
            }
        }
    }

    fn timeout(&self, now: Instant) -> Option<Timespec> {
        let active = self.active.iter();
        let active = active.filter_map(|place| self.served.get(*place as usize)?.as_ref());
        let mut wait = None;
        for Served { sandbox, busy, .. } in active {
            if *busy {
                wait = Some(Duration::ZERO);
                break;
            }
            let due = match sandbox.wakes_at() {
                Some(at) => at.saturating_duration_since(now).min(TICK),
                None if sandbox.has_timers() => TICK,
                None => continue,
            };
            wait = Some(wait.map_or(due, |wait: Duration| wait.min(due)));
        }
        Timespec::try_from(wait?).ok()
    }

    fn refresh(&mut self, now: Instant) -> std::io::Result<()> {
        self.refreshed = now;
        self.host = self.tables.read()?;
        self.resolvers = match self.fixed_resolvers.is_empty() {
            true => read_resolvers()?,
            false => self.fixed_resolvers.clone(),
        };
        Ok(())
    }

    fn go_on(&mut self, now: Instant) {
        let due =
            |served: &Served| served.busy || served.sandbox.wakes_at().is_some_and(|at| at <= now);
        for place in self.active.clone() {
            if let Some(Some(served)) = self.served.get(place as usize)
                && due(served)
            {
                self.guarded(place, now, |sandbox, cx| sandbox.go_on(cx));
            }
        }
    }

    fn tick(&mut self, now: Instant) {
        if now.saturating_duration_since(self.ticked) < TICK {
            return;
        }
        self.ticked = now;
        for place in self.active.clone() {
            if let Some(Some(served)) = self.served.get(place as usize)
                && served.sandbox.has_timers()
            {
                self.guarded(place, now, |sandbox, cx| sandbox.tick(cx));
            }
        }
    }

    /// Does something for one sandbox. A panic ends its network.
    fn guarded(
        &mut self,
        place: u32,
        now: Instant,
        work: impl FnOnce(&mut Sandbox, &mut Context<'_>) -> After,
    ) {
        let Some(Some(served)) = self.served.get_mut(place as usize) else {
            return;
        };
        let mut cx = Context {
            epoll: self.epoll.as_fd(),
            index: place,
            now,
            host: &self.host,
            resolvers: &self.resolvers,
            floor: &self.floor,
            id: &served.id,
            broker: self.broker.as_ref().map(AsFd::as_fd),
            buffer: &mut self.buffer,
        };
        let sandbox = &mut served.sandbox;
        let after = catch_unwind(AssertUnwindSafe(|| work(sandbox, &mut cx)));
        let notice = served
            .sandbox
            .take_notice()
            .map(|notice| (served.id.clone(), notice));
        if let Some((id, notice)) = notice {
            self.report(Report::Denied { id, notice });
        }
        let Some(Some(served)) = self.served.get_mut(place as usize) else {
            return;
        };
        match after {
            Ok(After::Waiting) => served.busy = false,
            Ok(After::Busy) => served.busy = true,
            Ok(After::Closed) => return self.end(place, Some(EndCause::Closed)),
            Err(_) => return self.end(place, Some(EndCause::Failed)),
        }
        match served.busy || served.sandbox.has_timers() {
            true => self.active.insert(place),
            false => self.active.remove(&place),
        };
    }

    fn end(&mut self, place: u32, why: Option<EndCause>) {
        let Some(served) = self.served.get_mut(place as usize).and_then(Option::take) else {
            return;
        };
        self.past.add(&served.sandbox.counters());
        self.active.remove(&place);
        self.places.remove(&served.id);
        if why == Some(EndCause::Failed) && self.spent.len() < MAX_SPENT {
            self.spent.insert(served.id.clone(), served.sandbox.spent());
        }
        if let Some(why) = why {
            self.report(Report::Ended {
                id: served.id,
                attachment: served.attachment,
                why,
            });
        }
    }

    fn report(&self, report: Report) {
        // The program lives as long as its workers do.
        let _ = self.reports.send(report);
        let _ = rustix::io::write(&*self.notify, &1u64.to_ne_bytes());
    }

    /// False once the program is gone.
    fn take_jobs(&mut self, now: Instant) -> bool {
        loop {
            match self.jobs.try_recv() {
                Ok(job) => self.job(job, now),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn job(&mut self, job: Job, now: Instant) {
        match job {
            Job::Attach {
                ticket,
                id,
                attachment,
                policy,
                brokered,
                generation,
                frames,
            } => {
                if let Some(place) = self.places.get(&id).copied() {
                    self.end(place, None);
                }
                let spent = self.spent.remove(&id).unwrap_or(0);
                let mut sandbox = Sandbox::new(frames, policy, generation, spent, now);
                sandbox.set_brokered(brokered);
                let result = self.admit(Served {
                    id,
                    attachment,
                    sandbox,
                    busy: false,
                });
                self.report(Report::Answer { ticket, result });
            }
            Job::Command { ticket, command } => {
                let result = self.command(command, now);
                self.report(Report::Answer { ticket, result });
            }
            Job::Configure {
                floor,
                resolvers,
                done,
            } => {
                self.floor = floor;
                self.fixed_resolvers = resolvers;
                let _ = self.refresh(now);
                for place in 0..self.served.len() {
                    self.guarded(place as u32, now, |sandbox, cx| {
                        sandbox.judge_again(cx);
                        After::Busy
                    });
                }
                let _ = done.send(());
            }
            Job::SetBroker { link, done } => {
                self.broker = Some(link);
                let _ = done.send(());
            }
            Job::Totals(answer) => {
                let mut sum = self.past;
                for served in self.served.iter().flatten() {
                    sum.add(&served.sandbox.counters());
                }
                let _ = answer.send(sum);
            }
        }
    }

    fn admit(&mut self, served: Served) -> Result<NetReply, NetError> {
        let place = match self.served.iter().position(Option::is_none) {
            Some(place) => place,
            None => {
                self.served.push(None);
                self.served.len() - 1
            }
        };
        let place = place as u32;
        let token = epoll::EventData::new_u64(u64::from(place) << 32 | u64::from(FRAMES));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&self.epoll, &served.sandbox, token, flags).map_err(|error| {
            NetError::Socket {
                reason: error.to_string(),
            }
        })?;
        self.places.insert(served.id.clone(), place);
        if let Some(free) = self.served.get_mut(place as usize) {
            *free = Some(served);
        }
        Ok(NetReply::Done)
    }

    fn command(&mut self, command: NetCommand, now: Instant) -> Result<NetReply, NetError> {
        let id = command.sandbox().cloned();
        let place = id.as_ref().and_then(|id| self.places.get(id).copied());
        let (Some(id), Some(place)) = (id.clone(), place) else {
            return match (command, id) {
                (NetCommand::Detach { .. }, _) | (_, None) => Ok(NetReply::Done),
                (_, Some(id)) => Err(NetError::Unknown { id }),
            };
        };
        if let NetCommand::Detach { .. } = command {
            self.end(place, None);
            return Ok(NetReply::Done);
        }
        let mut result = Err(NetError::Unknown { id });
        self.guarded(place, now, |sandbox, cx| {
            result = Ok(serve(sandbox, command, cx));
            After::Busy
        });
        result
    }
}

fn serve(sandbox: &mut Sandbox, command: NetCommand, cx: &mut Context<'_>) -> NetReply {
    match command {
        NetCommand::SetPolicy {
            policy,
            brokered,
            generation,
            ..
        } => {
            sandbox.set_brokered(brokered);
            sandbox.set_policy(policy, generation, cx);
            NetReply::Done
        }
        NetCommand::Reset { .. } => {
            sandbox.reset(cx);
            NetReply::Done
        }
        NetCommand::Stats { .. } => NetReply::Stats(sandbox.stats()),
        NetCommand::Flows { .. } => {
            let (flows, count) = sandbox.open_flows(cx.now);
            NetReply::Flows { flows, count }
        }
        NetCommand::Log { after, .. } => {
            let (entries, lost) = sandbox.log_after(after);
            NetReply::Log {
                entries,
                lost,
                last: sandbox.last_entry(),
            }
        }
        NetCommand::Attach { .. }
        | NetCommand::Detach { .. }
        | NetCommand::Hello { .. }
        | NetCommand::Configure { .. }
        | NetCommand::SetBroker { .. }
        | NetCommand::Totals
        | NetCommand::List { .. } => NetReply::Done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{GATEWAY, GUEST, HEADERS, VNET};
    use forkd_channel::Channel;
    use rustix::event::EventfdFlags;
    use std::sync::mpsc::channel;

    const FROM_GUEST: [u8; 6] = [2, 0, 0, 0, 0, 9];

    fn worker() -> (Worker, Receiver<Report>) {
        let event = || Arc::new(rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let (_jobs, receiver) = channel();
        let (report, reports) = channel();
        let worker = Worker::new(receiver, event(), report, event(), Vec::new()).unwrap();
        (worker, reports)
    }

    fn attach(worker: &mut Worker, id: &str) -> Channel {
        let (guest, engine) = Channel::pair().unwrap();
        let job = Job::Attach {
            ticket: Ticket { client: 0, seq: 0 },
            id: id.parse().unwrap(),
            attachment: 1,
            policy: Policy::none(),
            brokered: Vec::new(),
            generation: 1,
            frames: engine.into(),
        };
        worker.job(job, Instant::now());
        guest
    }

    /// A question for the hardware address of the gateway.
    fn arp() -> Vec<u8> {
        let mut frame = wire::frame([0xff; 6], [8, 6], 28);
        frame[VNET + 6..VNET + 12].copy_from_slice(&FROM_GUEST);
        let body = [
            &[0, 1, 8, 0, 6, 4, 0, 1][..],
            &FROM_GUEST,
            &GUEST.octets(),
            &[0; 6],
            &GATEWAY.octets(),
        ];
        frame[HEADERS..].copy_from_slice(&body.concat());
        frame
    }

    #[test]
    fn a_panic_ends_the_network_of_one_sandbox() {
        let (mut worker, reports) = worker();
        let (broken, whole) = (attach(&mut worker, "sb-1"), attach(&mut worker, "sb-2"));
        worker.guarded(0, Instant::now(), |_, _| panic!("on purpose"));
        let ended = reports.try_iter().find_map(|report| match report {
            Report::Ended { id, why, .. } => Some((id.to_string(), why)),
            _ => None,
        });
        assert_eq!(ended, Some(("sb-1".to_owned(), EndCause::Failed)));
        let mut buffer = [0; 128];
        assert_eq!(rustix::io::read(&broken, &mut buffer), Ok(0));
        rustix::io::write(&whole, &arp()).unwrap();
        worker.guarded(1, Instant::now(), |sandbox, cx| {
            sandbox.on_ready(FRAMES, epoll::EventFlags::IN, cx)
        });
        let len = rustix::io::read(&whole, &mut buffer).unwrap();
        assert_eq!(buffer[VNET..VNET + 6], FROM_GUEST, "{:?}", &buffer[..len]);
        // The same sandbox can be served again.
        let again = attach(&mut worker, "sb-1");
        rustix::io::write(&again, &arp()).unwrap();
        let place = worker.places[&"sb-1".parse().unwrap()];
        worker.guarded(place, Instant::now(), |sandbox, cx| {
            sandbox.on_ready(FRAMES, epoll::EventFlags::IN, cx)
        });
        assert!(rustix::io::read(&again, &mut buffer).unwrap() > 0);
    }
}
