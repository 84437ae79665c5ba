//! The machine from an empty shell on: building it, pausing and resuming it.
//!
//! [`Machine::prepare`] does everything that waits in the kernel and starts all threads, parked. A pause stops
//! vCPUs first, then the event loops, so no request arrives at a stopped device. When it returns, no thread
//! touches guest memory.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use forkd_devices::EventLoop;
use forkd_memory::{GuestRam, MemoryError, RamLayout, WorkingSet};
use forkd_sys::{Pagemap, PagemapError, WriteTracker};
use forkd_types::Engine;
use forkd_vmm_proto::{MAX_VCPUS, Shape, VmmPhase};
use kvm_bindings::kvm_cpuid_entry2;
use thiserror::Error;

use super::devices::{DeviceSet, DeviceSetError};
use super::history::History;
use super::vcpu::{SpawnError, VcpuHandle};
use super::{Notices, devices};
use crate::arch::x86_64::{cpuid, msr};
use crate::kvm::{Hypervisor, KvmError, Statistics, Vm};

const DEVICE_STACK: usize = 256 * 1024;
/// How often the counters ask the guest for memory statistics, which wakes it up.
const MEMORY_STATS_EVERY: Duration = Duration::from_secs(30);

/// Why there is no shell.
#[derive(Debug, Error)]
pub enum PrepareError {
    /// The shape is invalid.
    #[error("a VM cannot have {memory} MiB and {vcpus} vCPUs")]
    Shape { memory: u32, vcpus: u8 },
    /// The shape is for another engine.
    #[error("the shape is for the engine {engine}, this VMM is {}", Engine::FORKD)]
    Engine { engine: Engine },
    #[error("cannot build the virtual machine")]
    Kvm(#[from] KvmError),
    /// No address space.
    #[error("cannot reserve guest memory")]
    Memory(#[from] MemoryError),
    /// The devices cannot be set up.
    #[error("cannot set up the devices")]
    Devices(#[from] DeviceSetError),
    /// A thread cannot be started.
    #[error("cannot start the vCPU threads")]
    Vcpu(#[from] SpawnError),
    /// A device thread cannot be started.
    #[error("cannot start a device thread")]
    Thread(#[source] io::Error),
}

/// Why a machine did not stop or go on.
#[derive(Debug, Error)]
pub enum PauseError {
    /// The machine is in another phase.
    #[error("the machine is {phase:?}")]
    Phase {
        /// Where it is.
        phase: VmmPhase,
    },
    /// A device thread does not answer.
    #[error("a device thread does not answer")]
    Devices(#[source] io::Error),
}

/// Runs on each thread when it starts, with the kind of thread.
pub type ThreadStart = Arc<dyn Fn(ThreadKind) + Send + Sync>;

/// Kind of a thread, which decides its system call filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadKind {
    /// Runs a vCPU.
    Vcpu,
    /// Serves all devices but disks.
    Devices,
    /// Serves the disks.
    Disks,
}

pub struct Machine {
    pub(super) shape: Shape,
    pub(super) vm: Vm,
    pub(super) ram: Arc<GuestRam>,
    pub(super) vcpus: Vec<VcpuHandle>,
    pub(super) devices: DeviceSet,
    /// CPUID of this host as guests see it, before [`cpuid::for_vcpu`].
    pub(super) shown: Vec<kvm_cpuid_entry2>,
    /// The model-specific registers that a snapshot holds.
    pub(super) msr_indices: Vec<u32>,
    pub(super) history: History,
    pub(super) phase: VmmPhase,
    /// A boot or restore failed half-way; the shell is of no use any more.
    pub(super) spoiled: bool,
    statistics: Statistics,
    /// When the guest was last asked for memory statistics.
    asked_for_stats: Option<Instant>,
}

impl Machine {
    /// Builds a shell.
    pub fn prepare(
        hypervisor: &Hypervisor,
        shape: Shape,
        pagemap: Result<Pagemap, PagemapError>,
        notices: &Arc<Notices>,
        on_thread_start: &ThreadStart,
    ) -> Result<Self, PrepareError> {
        if shape.engine != Engine::FORKD {
            return Err(PrepareError::Engine {
                engine: shape.engine,
            });
        }
        let layout = RamLayout::new(shape.memory.0)
            .filter(|_| (1..=MAX_VCPUS).contains(&shape.vcpus))
            .ok_or(PrepareError::Shape {
                memory: shape.memory.0,
                vcpus: shape.vcpus,
            })?;
        let supported = hypervisor.supported_cpuid()?;
        let vm = Vm::new(hypervisor)?;
        if !vm.missing_hardening().is_empty() {
            tracing::info!(missing = ?vm.missing_hardening(), "KVM lacks protections");
        }
        let ram = Arc::new(GuestRam::reserve(layout)?);
        vm.set_memory(&ram)?;
        let (devices, loops) = DeviceSet::new(&vm, notices)?;
        for (kind, event_loop) in [
            (ThreadKind::Devices, loops.devices),
            (ThreadKind::Disks, loops.disks),
        ] {
            start_loop(kind, event_loop, Arc::clone(on_thread_start))
                .map_err(PrepareError::Thread)?;
        }
        let shown = cpuid::for_vm(
            &supported,
            shape.cpu,
            shape.vcpus,
            hypervisor.has_tsc_deadline(),
        );
        let mut statistics = Statistics::default();
        vm.add_statistics(&mut statistics);
        let mut vcpus = Vec::with_capacity(usize::from(shape.vcpus));
        for number in 0..shape.vcpus {
            let mut vcpu = vm.create_vcpu(number)?;
            vcpu.add_statistics(&mut statistics);
            vcpu.set_cpuid(&cpuid::for_vcpu(&shown, number))?;
            let start = Arc::clone(on_thread_start);
            vcpus.push(VcpuHandle::spawn(
                number,
                vcpu,
                devices.buses(),
                Arc::clone(notices),
                move || start(ThreadKind::Vcpu),
            )?);
        }
        Ok(Self {
            shape,
            vm,
            ram,
            vcpus,
            devices,
            shown,
            msr_indices: hypervisor
                .msr_indices()?
                .into_iter()
                .filter(|index| msr::is_saved(*index))
                .collect(),
            history: History::new(WriteTracker::open().ok(), pagemap),
            phase: VmmPhase::Shell,
            spoiled: false,
            statistics,
            asked_for_stats: None,
        })
    }

    /// Where it is in its life.
    pub fn phase(&self) -> VmmPhase {
        self.phase
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Whether it is a shell that can be filled.
    pub fn is_fresh(&self) -> bool {
        self.phase == VmmPhase::Shell && !self.spoiled
    }

    /// Stops vCPUs, then devices. When this returns nothing moves any more.
    pub fn pause(&mut self) -> Result<(), PauseError> {
        if self.phase != VmmPhase::Running {
            return Err(PauseError::Phase { phase: self.phase });
        }
        self.stop_threads()?;
        self.phase = VmmPhase::Paused;
        Ok(())
    }

    pub(super) fn stop_threads(&self) -> Result<(), PauseError> {
        // A vCPU may wait for a device that has much to do.
        let asked = self.devices.ask_pause();
        for vcpu in &self.vcpus {
            vcpu.ask_pause();
        }
        for vcpu in &self.vcpus {
            vcpu.wait_paused();
        }
        if let Err(error) = asked.and_then(|()| self.devices.pause()) {
            self.start_threads();
            return Err(PauseError::Devices(error));
        }
        Ok(())
    }

    /// Lets vCPUs and devices go on.
    pub fn resume(&mut self) -> Result<(), PauseError> {
        if self.phase != VmmPhase::Paused {
            return Err(PauseError::Phase { phase: self.phase });
        }
        self.go_on();
        self.phase = VmmPhase::Running;
        Ok(())
    }

    /// Lets a machine that stood still go on, and tells the guest.
    pub(super) fn go_on(&self) {
        for vcpu in &self.vcpus {
            vcpu.with(|vcpu| vcpu.note_pause());
        }
        self.start_threads();
    }

    /// The pause: from `stopped` until the last vCPU runs again, or until now if one does not run yet.
    pub(super) fn standstill(&self, stopped: Instant) -> Duration {
        let now = Instant::now();
        let end = self
            .vcpus
            .iter()
            .map(|vcpu| vcpu.entered().filter(|at| *at > stopped).unwrap_or(now))
            .max();
        end.unwrap_or(now).duration_since(stopped)
    }

    /// vCPUs first: what they ask of the devices waits until those go on.
    pub(super) fn start_threads(&self) {
        for vcpu in &self.vcpus {
            vcpu.resume();
        }
        // Waking a loop fails only without its eventfd, which lives as long as the process.
        if let Err(error) = self.devices.resume() {
            tracing::error!(%error, "a device thread cannot be woken");
        }
    }

    /// Begins to run, or stays paused.
    pub(super) fn begin(&mut self, run: bool) {
        self.phase = VmmPhase::Paused;
        if run {
            self.start_threads();
            self.phase = VmmPhase::Running;
        }
    }

    /// Presses the power button.
    pub fn press_power_button(&self) {
        self.devices.press_power_button();
    }

    /// The devices, for what does not change the machine's phase.
    pub fn devices(&self) -> &devices::DeviceSet {
        &self.devices
    }

    /// All counters of the devices and of KVM. Costs the guest at most one interrupt in `MEMORY_STATS_EVERY`, for
    /// new memory statistics.
    pub fn counters(&mut self) -> Vec<(String, u64)> {
        let due = self
            .asked_for_stats
            .is_none_or(|at| at.elapsed() >= MEMORY_STATS_EVERY);
        // The rings of a paused machine must not move.
        if due && self.phase == VmmPhase::Running {
            self.asked_for_stats = Some(Instant::now());
            self.devices.ask_for_memory_stats();
        }
        let mut all = self.devices.counters();
        self.statistics.counters(&mut all);
        all
    }

    /// The pages touched since boot or restore.
    pub fn working_set(&self) -> Result<WorkingSet, MemoryError> {
        match self.history.pagemap() {
            Some(pagemap) => WorkingSet::record(&self.ram, pagemap),
            None => Err(MemoryError::Unknown),
        }
    }
}

/// Starts a thread that runs an event loop until the process ends. Returns once `start` has confined it.
fn start_loop(kind: ThreadKind, event_loop: EventLoop, start: ThreadStart) -> io::Result<()> {
    let name = match kind {
        ThreadKind::Disks => "disks",
        _ => "devices",
    };
    let (confined, wait) = mpsc::channel();
    std::thread::Builder::new()
        .name(name.into())
        .stack_size(DEVICE_STACK)
        .spawn(move || {
            start(kind);
            // The caller waits for exactly this.
            let _ = confined.send(());
            if let Err(error) = event_loop.run() {
                tracing::error!(%error, thread = name, "a device thread ended");
            }
        })?;
    wait.recv().map_err(|_| io::ErrorKind::BrokenPipe.into())
}
