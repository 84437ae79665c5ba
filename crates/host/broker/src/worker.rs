//! One thread that serves a share of the flows.
//!
//! The program sends [`Job`]s over a channel and wakes the worker by an event descriptor. A panic while a flow is served
//! ends that flow alone.

use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use forkd_net_proto::broker::{BrokerCounters, BrokeredFlow, Refusal};
use rustix::event::{Timespec, epoll};
use rustls::ClientConfig;

use crate::authority::Signer;
use crate::flow::{After, Flow};
use crate::vault::Vault;

/// The token of the descriptor that announces jobs.
const WAKE: u64 = u64::MAX;
const TICK: Duration = Duration::from_secs(1);
const MAX_EVENTS: usize = 256;
/// Connections of one worker.
const MAX_FLOWS: usize = 4096;

/// A connection for a worker: the stream of the guest and the socket of the upstream.
pub struct Job {
    pub wish: BrokeredFlow,
    pub guest: OwnedFd,
    pub upstream: OwnedFd,
}

/// A refusal, for the program.
pub struct Report {
    pub wish: BrokeredFlow,
    pub reason: Refusal,
}

/// Everything that workers share.
pub struct Shared {
    pub vault: Arc<RwLock<Vault>>,
    /// Without an authority no flow is served.
    pub signer: Mutex<Option<Signer>>,
    pub client: Arc<ClientConfig>,
    pub connections: AtomicU64,
    pub requests: AtomicU64,
    pub refused: AtomicU64,
}

impl Shared {
    pub fn new(client: Arc<ClientConfig>) -> Self {
        Self {
            vault: Arc::default(),
            signer: Mutex::new(None),
            client,
            connections: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    pub fn counters(&self) -> BrokerCounters {
        BrokerCounters {
            connections: self.connections.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
        }
    }
}

/// One thread and the flows that it serves.
pub struct Worker {
    epoll: OwnedFd,
    jobs: Receiver<Job>,
    wake: Arc<OwnedFd>,
    reports: Sender<Report>,
    /// Wakes the program.
    notify: Arc<OwnedFd>,
    shared: Arc<Shared>,
    flows: Vec<Option<Box<Flow>>>,
    open: usize,
    ticked: Instant,
}

impl Worker {
    pub fn new(
        jobs: Receiver<Job>,
        wake: Arc<OwnedFd>,
        reports: Sender<Report>,
        notify: Arc<OwnedFd>,
        shared: Arc<Shared>,
    ) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let token = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &wake, token, epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            jobs,
            wake,
            reports,
            notify,
            shared,
            flows: Vec::new(),
            open: 0,
            ticked: Instant::now(),
        })
    }

    /// Serves until the program ends.
    pub fn run(mut self) {
        let mut events = Vec::with_capacity(MAX_EVENTS);
        loop {
            events.clear();
            let timeout = (self.open > 0)
                .then(|| Timespec::try_from(TICK).ok())
                .flatten();
            let buffer = rustix::buffer::spare_capacity(&mut events);
            if epoll::wait(&self.epoll, buffer, timeout.as_ref()).is_err() {
                events.clear();
            }
            let now = Instant::now();
            for event in &events {
                match event.data.u64() {
                    WAKE => {
                        let _ = rustix::io::read(&*self.wake, &mut [0u8; 8]);
                    }
                    token => self.on_ready(token, event.flags, now),
                }
            }
            self.tick(now);
            if !self.take_jobs(now) {
                return;
            }
        }
    }

    fn on_ready(&mut self, token: u64, flags: epoll::EventFlags, now: Instant) {
        use epoll::EventFlags as F;
        let place = usize::try_from(token >> 1).unwrap_or(usize::MAX);
        let Some(Some(flow)) = self.flows.get_mut(place) else {
            return;
        };
        let guest = token & 1 == 0;
        if guest && flags.intersects(F::HUP | F::ERR) {
            // The engine closed the stream: no answer can reach the guest any more.
            self.end(place);
            return;
        }
        let end = match (guest, &mut flow.upstream) {
            (true, _) => &mut flow.guest,
            (false, Some(upstream)) => upstream,
            (false, None) => return,
        };
        end.readable |= flags.intersects(F::IN | F::RDHUP | F::HUP | F::ERR);
        end.writable |= flags.intersects(F::OUT | F::ERR);
        self.guarded(place, |flow| flow.pump(now));
    }

    fn tick(&mut self, now: Instant) {
        if now.saturating_duration_since(self.ticked) < TICK {
            return;
        }
        self.ticked = now;
        for place in 0..self.flows.len() {
            self.guarded(place, |flow| flow.tick(now));
        }
    }

    /// Does something for one flow. A panic ends it.
    fn guarded(&mut self, place: usize, work: impl FnOnce(&mut Flow) -> (After, Option<Refusal>)) {
        let Some(Some(flow)) = self.flows.get_mut(place) else {
            return;
        };
        let (after, refusal) =
            catch_unwind(AssertUnwindSafe(|| work(flow))).unwrap_or((After::Done, None));
        let requests = flow.take_requests();
        self.shared.requests.fetch_add(requests, Ordering::Relaxed);
        let report = refusal.map(|reason| Report {
            wish: flow.wish.clone(),
            reason,
        });
        if after == After::Done {
            self.end(place);
        }
        if let Some(report) = report {
            self.report(report);
        }
    }

    fn end(&mut self, place: usize) {
        if self.flows.get_mut(place).and_then(Option::take).is_some() {
            self.open -= 1;
        }
    }

    fn report(&self, report: Report) {
        self.shared.refused.fetch_add(1, Ordering::Relaxed);
        // The program lives as long as its workers do.
        let _ = self.reports.send(report);
        let _ = rustix::io::write(&*self.notify, &1u64.to_ne_bytes());
    }

    /// False once the program is gone.
    fn take_jobs(&mut self, now: Instant) -> bool {
        loop {
            match self.jobs.try_recv() {
                Ok(job) => self.take(job, now),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn take(&mut self, job: Job, now: Instant) {
        self.shared.connections.fetch_add(1, Ordering::Relaxed);
        let wish = job.wish.clone();
        if let Err(reason) = self.admit(job, now) {
            self.report(Report { wish, reason });
        }
    }

    fn admit(&mut self, job: Job, now: Instant) -> Result<(), Refusal> {
        if self.open >= MAX_FLOWS {
            return Err(Refusal::Limit);
        }
        let vault = &self.shared.vault;
        let known = |vault: &Vault| vault.serves(&job.wish.id, &job.wish.to);
        if !known(&vault.read().unwrap_or_else(PoisonError::into_inner)) {
            return Err(Refusal::NoRule);
        }
        let server = {
            let mut signer = self
                .shared
                .signer
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let signer = signer.as_mut().ok_or(Refusal::NoRule)?;
            signer
                .answers_for(&job.wish.to.host)
                .map_err(|_| Refusal::GuestTls)?
        };
        let (client, vault) = (Arc::clone(&self.shared.client), Arc::clone(vault));
        let sockets = (job.guest, job.upstream);
        let flow = Flow::new(job.wish, sockets, server, client, vault, now)
            .map_err(|_| Refusal::UpstreamTls)?;
        let place = match self.flows.iter().position(Option::is_none) {
            Some(place) => place,
            None => {
                self.flows.push(None);
                self.flows.len() - 1
            }
        };
        self.listen(place, &flow).map_err(|_| Refusal::Limit)?;
        if let Some(free) = self.flows.get_mut(place) {
            *free = Some(Box::new(flow));
            self.open += 1;
        }
        self.guarded(place, |flow| flow.pump(now));
        Ok(())
    }

    fn listen(&self, place: usize, flow: &Flow) -> rustix::io::Result<()> {
        use epoll::EventFlags as F;
        let flags = F::IN | F::OUT | F::RDHUP | F::ET;
        let token = |side: u64| epoll::EventData::new_u64((place as u64) << 1 | side);
        epoll::add(&self.epoll, flow.guest.fd.as_fd(), token(0), flags)?;
        match &flow.upstream {
            Some(upstream) => epoll::add(&self.epoll, upstream.fd.as_fd(), token(1), flags),
            None => Ok(()),
        }
    }
}
