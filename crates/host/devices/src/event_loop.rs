//! The epoll loop of a device thread.
//!
//! [`EventLoop`] serves a set of [`EventTarget`]s on one thread; [`LoopHandle`] pauses, resumes and stops it from
//! other threads. Everything is level-triggered, so an event that was not handled comes back. That lets a pause
//! drop the rest of a batch and lets a device give up its turn. When a pause returns, no target is inside
//! `on_event`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::event::epoll;

use crate::EventFd;

/// Which way a descriptor is ready.
pub type Ready = epoll::EventFlags;

const BATCH: usize = 32;
const WAKE: u64 = u64::MAX;

/// Something that descriptors are registered for.
pub trait EventTarget: Send + Sync {
    /// A descriptor registered with `token` is ready. Called from the device thread, never while the
    /// loop is paused. May come for a token whose descriptor has just been taken out.
    fn on_event(&self, token: u32, ready: Ready);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Paused,
    Running,
    Stopped,
}

#[derive(Debug)]
struct Phases {
    /// The phase that was requested.
    wanted: Phase,
    /// The phase the thread is in.
    actual: Phase,
    /// The thread is inside [`EventLoop::run`].
    attached: bool,
}

#[derive(Debug)]
struct Shared {
    epoll: OwnedFd,
    wake: EventFd,
    phases: Mutex<Phases>,
    changed: Condvar,
    yielding: AtomicBool,
}

/// Registers descriptors of one target. Can be used from any thread.
#[derive(Debug, Clone)]
pub struct Registrar {
    shared: Arc<Shared>,
    target: u32,
}

impl Registrar {
    fn data(&self, token: u32) -> epoll::EventData {
        epoll::EventData::new_u64(u64::from(self.target) << 32 | u64::from(token))
    }

    /// Listens to a descriptor.
    pub fn add(&self, fd: impl AsFd, token: u32, ready: Ready) -> io::Result<()> {
        epoll::add(&self.shared.epoll, fd, self.data(token), ready)?;
        Ok(())
    }

    /// Changes what is listened to.
    pub fn modify(&self, fd: impl AsFd, token: u32, ready: Ready) -> io::Result<()> {
        epoll::modify(&self.shared.epoll, fd, self.data(token), ready)?;
        Ok(())
    }

    /// Stops listening. A descriptor that was not registered is fine.
    pub fn remove(&self, fd: impl AsFd) {
        // The only failures are "not registered" and "not a descriptor", and both mean that it is gone.
        let _ = epoll::delete(&self.shared.epoll, fd);
    }

    /// True when a pause is waiting: finish the request in hand, then return.
    pub fn should_yield(&self) -> bool {
        self.shared.yielding.load(Ordering::Relaxed)
    }
}

/// The loop, before and while its thread runs it. It is made paused.
pub struct EventLoop {
    shared: Arc<Shared>,
    targets: Vec<Arc<dyn EventTarget>>,
}

/// Controls the loop from other threads.
#[derive(Debug, Clone)]
pub struct LoopHandle(Arc<Shared>);

impl EventLoop {
    /// A paused loop without targets.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = EventFd::new()?;
        epoll::add(
            &epoll,
            &wake,
            epoll::EventData::new_u64(WAKE),
            epoll::EventFlags::IN,
        )?;
        let phases = Phases {
            wanted: Phase::Paused,
            actual: Phase::Paused,
            attached: false,
        };
        Ok(Self {
            shared: Arc::new(Shared {
                epoll,
                wake,
                phases: Mutex::new(phases),
                changed: Condvar::new(),
                yielding: AtomicBool::new(true),
            }),
            targets: Vec::new(),
        })
    }

    /// The handle for other threads.
    pub fn handle(&self) -> LoopHandle {
        LoopHandle(Arc::clone(&self.shared))
    }

    /// Adds a target made by `make`, which is given the registrar for its descriptors.
    pub fn add<T: EventTarget + 'static, E>(
        &mut self,
        make: impl FnOnce(Registrar) -> Result<Arc<T>, E>,
    ) -> Result<Arc<T>, E> {
        let target = u32::try_from(self.targets.len()).unwrap_or(u32::MAX);
        let made = make(Registrar {
            shared: Arc::clone(&self.shared),
            target,
        })?;
        self.targets.push(Arc::clone(&made) as Arc<dyn EventTarget>);
        Ok(made)
    }

    /// Runs until stopped. The body of the device thread.
    pub fn run(self) -> io::Result<()> {
        self.shared.enter();
        let result = self.turn();
        self.shared.leave();
        result
    }

    /// Handles what is ready, without waiting; returns how many events there were.
    #[cfg(any(test, feature = "test-utils"))]
    pub fn poll_once(&self) -> io::Result<usize> {
        let now = rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        self.wait_and_dispatch(&mut Vec::with_capacity(BATCH), Some(&now))
    }

    fn turn(&self) -> io::Result<()> {
        let mut events = Vec::with_capacity(BATCH);
        while self.shared.wait_until_wanted() {
            self.wait_and_dispatch(&mut events, None)?;
        }
        Ok(())
    }

    fn wait_and_dispatch(
        &self,
        events: &mut Vec<epoll::Event>,
        timeout: Option<&rustix::time::Timespec>,
    ) -> io::Result<usize> {
        events.clear();
        match epoll::wait(
            &self.shared.epoll,
            rustix::buffer::spare_capacity(events),
            timeout,
        ) {
            Ok(count) => {
                self.dispatch(events);
                Ok(count)
            }
            Err(rustix::io::Errno::INTR) => Ok(0),
            Err(errno) => Err(errno.into()),
        }
    }

    fn dispatch(&self, events: &[epoll::Event]) {
        for event in events {
            let data = event.data.u64();
            if data == WAKE {
                self.shared.wake.take();
                continue;
            }
            if self.shared.yielding.load(Ordering::Acquire) {
                return;
            }
            // The two halves of the number that `Registrar::data` put together.
            let (target, token) = ((data >> 32) as usize, data as u32);
            if let Some(target) = self.targets.get(target) {
                target.on_event(token, event.flags);
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Phases> {
        self.phases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self) {
        self.lock().attached = true;
    }

    fn leave(&self) {
        let mut phases = self.lock();
        phases.actual = Phase::Stopped;
        phases.attached = false;
        self.changed.notify_all();
    }

    /// Takes on the wanted phase; false when that is the end.
    fn wait_until_wanted(&self) -> bool {
        let mut phases = self.lock();
        loop {
            if phases.actual != phases.wanted {
                phases.actual = phases.wanted;
                self.changed.notify_all();
            }
            match phases.wanted {
                Phase::Running => return true,
                Phase::Stopped => return false,
                Phase::Paused => {
                    phases = self
                        .changed
                        .wait(phases)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Sets what is wanted, unless that is the end already.
    fn ask(&self, phase: Phase) -> io::Result<Option<std::sync::MutexGuard<'_, Phases>>> {
        let mut phases = self.lock();
        if phases.wanted == Phase::Stopped {
            return Ok(None);
        }
        phases.wanted = phase;
        self.yielding
            .store(phase != Phase::Running, Ordering::Release);
        self.changed.notify_all();
        if phase != Phase::Running {
            self.wake.signal()?;
        }
        Ok(Some(phases))
    }

    fn want(&self, phase: Phase) -> io::Result<()> {
        let Some(mut phases) = self.ask(phase)? else {
            return Ok(());
        };
        while phases.attached && phases.actual != phase && phases.wanted == phase {
            phases = self
                .changed
                .wait(phases)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }
}

impl LoopHandle {
    /// Asks the devices to stop soon, as [`LoopHandle::pause`] does, and does not wait for it.
    pub fn ask_pause(&self) -> io::Result<()> {
        self.0.ask(Phase::Paused).map(drop)
    }

    /// Stops the devices between two requests. When this returns nothing is in flight and no device does
    /// anything until [`LoopHandle::resume`]. Not to be called from the device thread.
    pub fn pause(&self) -> io::Result<()> {
        self.0.want(Phase::Paused)
    }

    /// Whether the thread of the loop stands still.
    pub fn is_paused(&self) -> bool {
        self.0.lock().actual == Phase::Paused
    }

    /// Lets the devices go on.
    pub fn resume(&self) -> io::Result<()> {
        self.0.want(Phase::Running)
    }

    /// Ends [`EventLoop::run`]; there is no way back.
    pub fn stop(&self) -> io::Result<()> {
        self.0.want(Phase::Stopped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    struct Bell {
        fd: EventFd,
        rung: AtomicU32,
        token: u32,
    }

    impl EventTarget for Bell {
        fn on_event(&self, token: u32, _ready: Ready) {
            assert_eq!(token, self.token);
            self.fd.take();
            self.rung.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn bell(event_loop: &mut EventLoop, token: u32) -> Arc<Bell> {
        event_loop
            .add(|registrar| {
                let bell = Bell {
                    fd: EventFd::new()?,
                    rung: AtomicU32::new(0),
                    token,
                };
                registrar.add(&bell.fd, token, Ready::IN)?;
                io::Result::Ok(Arc::new(bell))
            })
            .unwrap()
    }

    fn wait_for(bell: &Bell, count: u32) {
        while bell.rung.load(Ordering::SeqCst) < count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn events_reach_their_target_and_pause_holds_them_back() {
        let mut event_loop = EventLoop::new().unwrap();
        let first = bell(&mut event_loop, 3);
        let second = bell(&mut event_loop, u32::MAX);
        let handle = event_loop.handle();
        let thread = std::thread::spawn(move || event_loop.run());

        first.fd.signal().unwrap();
        handle.resume().unwrap();
        wait_for(&first, 1);

        handle.pause().unwrap();
        second.fd.signal().unwrap();
        assert_eq!(second.rung.load(Ordering::SeqCst), 0);
        handle.resume().unwrap();
        wait_for(&second, 1);
        assert_eq!(first.rung.load(Ordering::SeqCst), 1);

        handle.stop().unwrap();
        thread.join().unwrap().unwrap();
        handle.pause().unwrap();
        handle.resume().unwrap();
    }

    #[test]
    fn a_loop_without_a_thread_can_be_paused_and_stopped() {
        let event_loop = EventLoop::new().unwrap();
        let handle = event_loop.handle();
        handle.resume().unwrap();
        handle.pause().unwrap();
        handle.stop().unwrap();
        event_loop.run().unwrap();
    }
}
