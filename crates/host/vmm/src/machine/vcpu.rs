//! A vCPU and its thread.
//!
//! The thread parks at a gate until the vCPU is to run. To stop it, the control thread sets `immediate_exit`
//! under the gate's lock and sends the kick signal. Every exit is completed by re-entering `KVM_RUN`, so a
//! parked vCPU has no access in progress.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forkd_devices::bus::Bus;
use forkd_sys::KickTarget;
use forkd_vmm_proto::StopCause;

use super::Notices;
use crate::kvm::{EXIT_BUS_LOCK, KvmError, RunPage, Vcpu, VcpuExit};

/// Enough for a register access through a device; nothing on a vCPU thread goes deeper.
const STACK: usize = 256 * 1024;

/// How long a vCPU rests after a bus lock, which has stopped all CPUs of the host for a moment. Bounds a
/// guest to a thousand a second per vCPU.
const BUS_LOCK_REST: Duration = Duration::from_millis(1);

/// The devices that answer the guest's accesses.
pub struct Buses {
    /// Devices at I/O ports.
    pub ports: Bus,
    /// Devices at physical addresses.
    pub memory: Bus,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Parked,
    Running,
}

struct Gate {
    wanted: Wanted,
    parked: bool,
    /// The guest has ended; this thread runs it no more.
    over: bool,
    /// When it last began to run.
    entered: Option<Instant>,
}

struct Shared {
    vcpu: Mutex<Vcpu>,
    run_page: RunPage,
    gate: Mutex<Gate>,
    changed: Condvar,
}

/// A vCPU whose thread exists, parked at first.
pub struct VcpuHandle {
    shared: Arc<Shared>,
    target: KickTarget,
    _thread: JoinHandle<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VcpuHandle {
    /// Starts the thread; `begin` runs on it first.
    pub fn spawn(
        number: u8,
        vcpu: Vcpu,
        buses: Arc<Buses>,
        notices: Arc<Notices>,
        begin: impl FnOnce() + Send + 'static,
    ) -> Result<Self, SpawnError> {
        let shared = Arc::new(Shared {
            run_page: vcpu.run_page()?,
            vcpu: Mutex::new(vcpu),
            gate: Mutex::new(Gate {
                wanted: Wanted::Parked,
                parked: true,
                over: false,
                entered: None,
            }),
            changed: Condvar::new(),
        });
        let (tell, told) = mpsc::channel();
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(format!("vcpu{number}"))
            .stack_size(STACK)
            .spawn(move || {
                begin();
                // The other end waits for exactly this.
                let _ = tell.send(KickTarget::current());
                theirs.work(&buses, &notices);
            })
            .map_err(SpawnError::Thread)?;
        let target = told
            .recv()
            .map_err(|_| SpawnError::Thread(io::ErrorKind::BrokenPipe.into()))?;
        Ok(Self {
            shared,
            target,
            _thread: thread,
        })
    }

    /// Lets it run.
    pub fn resume(&self) {
        let mut gate = lock(&self.shared.gate);
        gate.wanted = Wanted::Running;
        self.shared.changed.notify_all();
    }

    /// Tells it to stop, without waiting.
    pub fn ask_pause(&self) {
        let mut gate = lock(&self.shared.gate);
        gate.wanted = Wanted::Parked;
        self.shared.run_page.ask_exit();
        if !gate.parked {
            // The thread lives as long as the process, so the signal finds it.
            let _ = self.target.kick();
        }
    }

    /// Waits until it has stopped.
    pub fn wait_paused(&self) {
        let mut gate = lock(&self.shared.gate);
        while !gate.parked {
            gate = self
                .shared
                .changed
                .wait(gate)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// When it last began to run.
    pub fn entered(&self) -> Option<Instant> {
        lock(&self.shared.gate).entered
    }

    /// Works on the vCPU, which must be parked.
    pub fn with<R>(&self, work: impl FnOnce(&mut Vcpu) -> R) -> R {
        work(&mut lock(&self.shared.vcpu))
    }
}

/// Why a vCPU thread does not exist.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The kernel refused a thread.
    #[error("cannot start a vCPU thread")]
    Thread(#[source] io::Error),
    #[error("cannot prepare a vCPU for its thread")]
    Kvm(#[from] KvmError),
}

impl Shared {
    fn work(&self, buses: &Buses, notices: &Notices) {
        loop {
            self.wait_for_turn();
            let mut vcpu = lock(&self.vcpu);
            if let Some(cause) = run(&mut vcpu, buses, notices) {
                drop(vcpu);
                notices.stop(cause);
                lock(&self.gate).over = true;
            }
        }
    }

    /// Parks until this vCPU is to run.
    fn wait_for_turn(&self) {
        let mut gate = lock(&self.gate);
        while gate.wanted == Wanted::Parked || gate.over {
            if !gate.parked {
                gate.parked = true;
                self.changed.notify_all();
            }
            gate = self
                .changed
                .wait(gate)
                .unwrap_or_else(PoisonError::into_inner);
        }
        gate.parked = false;
        gate.entered = Some(Instant::now());
        self.run_page.allow_entry();
    }
}

/// Runs the guest until it is called out; a cause if it cannot go on.
fn run(vcpu: &mut Vcpu, buses: &Buses, notices: &Notices) -> Option<StopCause> {
    loop {
        let exit = match vcpu.run() {
            Ok(exit) => exit,
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => return None,
                Some(libc::EAGAIN) => continue,
                _ => {
                    tracing::error!(%error, "a vCPU cannot run");
                    return Some(StopCause::VcpuFailed);
                }
            },
        };
        match exit {
            VcpuExit::IoOut(port, data) => each_access(data.len(), |part| {
                if let Some(data) = data.get(part) {
                    buses.ports.write(u64::from(port), data);
                }
            }),
            VcpuExit::IoIn(port, data) => each_access(data.len(), |part| {
                if let Some(data) = data.get_mut(part) {
                    buses.ports.read(u64::from(port), data);
                }
            }),
            VcpuExit::MmioRead(address, data) => {
                buses.memory.read(address, data);
            }
            VcpuExit::MmioWrite(address, data) => {
                buses.memory.write(address, data);
            }
            VcpuExit::Hlt | VcpuExit::Intr | VcpuExit::IrqWindowOpen => {}
            VcpuExit::Unsupported(EXIT_BUS_LOCK) => {
                notices.bus_locks.inc();
                std::thread::sleep(BUS_LOCK_REST);
            }
            VcpuExit::Shutdown => {
                tracing::warn!("the guest met a triple fault");
                return Some(StopCause::VcpuFailed);
            }
            VcpuExit::SystemEvent(kind, _) => {
                tracing::warn!(kind, "the guest ended by a system event");
                return Some(StopCause::VcpuFailed);
            }
            other => {
                tracing::error!(exit = ?other, "a vCPU left the guest for a reason that has no answer");
                return Some(StopCause::VcpuFailed);
            }
        }
    }
}

/// A string instruction brings several accesses at once; a plain one brings one of 1, 2 or 4 bytes.
fn each_access(len: usize, mut access: impl FnMut(std::ops::Range<usize>)) {
    if matches!(len, 1 | 2 | 4) {
        access(0..len);
    } else {
        (0..len).for_each(|at| access(at..at + 1));
    }
}
