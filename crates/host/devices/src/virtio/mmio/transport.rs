//! A virtio slot: registers, doorbells, an interrupt line, and a device.
//!
//! [`MmioTransport`] exists with its doorbells before it has a device. vCPU threads access registers, an event
//! loop calls the device, the control thread saves and restores; one lock per slot orders them. A device that
//! fails is reset and reports `NEEDS_RESET`; the rest of the machine goes on.

use std::any::Any;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forkd_vmm_proto::DeviceSlot;
use thiserror::Error;

use super::inner::{Inner, set_high, set_low};
use super::registers::{self as reg, status};
use crate::metrics::{Counters, counters};
use crate::virtio::{
    Activation, DeviceError, FIRST_DEVICE_TOKEN, Interrupt, QueueSnapshot, RestoreError, SlotState,
    SlotStateV1, VirtioDevice, feature,
};
use crate::{DeviceEvents, EventFd, EventTarget, GuestMemory, Ready, Registrar};

/// The size of a slot's register window.
pub const MMIO_WINDOW: u64 = 0x1000;

/// How many queues, and so doorbells, a slot has.
pub const fn queue_count(slot: DeviceSlot) -> usize {
    match slot {
        DeviceSlot::Rng | DeviceSlot::Disk(_) => 1,
        DeviceSlot::Net => 2,
        DeviceSlot::Vsock => 3,
        DeviceSlot::Balloon => 5,
        DeviceSlot::Console => 0,
    }
}

counters! {
    /// Counters of a slot.
    pub struct SlotMetrics {
        /// Times a driver became ready.
        activations,
        /// Times a driver reset the device.
        resets,
        /// Times the device met input it could not work with.
        failures,
        /// Register accesses that make no sense.
        bad_accesses,
    }
}

/// Why a device cannot be put into a slot.
#[derive(Debug, Error)]
pub enum SlotError {
    /// The slot has a device already.
    #[error("the slot {slot:?} is taken")]
    Taken { slot: DeviceSlot },
    /// The device has more queues than the slot has doorbells.
    #[error("a device with {wanted} queues does not fit the slot {slot:?}")]
    Queues {
        slot: DeviceSlot,
        /// Queues of the device.
        wanted: usize,
    },
    /// The saved state is refused.
    #[error("the state of the slot {slot:?} is refused")]
    State {
        slot: DeviceSlot,
        #[source]
        source: RestoreError,
    },
}

/// A virtio slot. It exists, with its doorbells, before there is a device in it; an empty one shows the
/// guest device id 0.
pub struct MmioTransport {
    slot: DeviceSlot,
    pub(super) interrupt: Arc<Interrupt>,
    pub(super) doorbells: Arc<[EventFd]>,
    registrar: Registrar,
    events: Arc<dyn DeviceEvents>,
    pub(super) metrics: SlotMetrics,
    /// The counters of the device in the slot. Beside [`Inner`], so that reading them never waits for a
    /// device that is busy.
    device_metrics: Mutex<Option<Arc<dyn Counters>>>,
    inner: Mutex<Inner>,
}

impl MmioTransport {
    /// An empty slot whose doorbells are registered with the loop.
    pub fn new(
        slot: DeviceSlot,
        registrar: Registrar,
        events: Arc<dyn DeviceEvents>,
    ) -> io::Result<Arc<Self>> {
        let doorbells = (0..queue_count(slot))
            .map(|_| EventFd::new())
            .collect::<io::Result<Vec<_>>>()?;
        for (token, doorbell) in (0..).zip(&doorbells) {
            registrar.add(doorbell, token, Ready::IN)?;
        }
        Ok(Arc::new(Self {
            slot,
            interrupt: Arc::new(Interrupt::new(EventFd::new()?)),
            doorbells: doorbells.into(),
            registrar,
            events,
            metrics: SlotMetrics::default(),
            device_metrics: Mutex::default(),
            inner: Mutex::new(Inner::empty()),
        }))
    }

    /// Which slot this is.
    pub fn slot(&self) -> DeviceSlot {
        self.slot
    }

    /// The doorbells, to be rung by KVM when the guest writes the queue number to
    /// [`MmioTransport::NOTIFY_OFFSET`].
    pub fn doorbells(&self) -> &[EventFd] {
        &self.doorbells
    }

    /// The interrupt line.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }

    /// Where in the window the guest writes the number of a queue.
    pub const NOTIFY_OFFSET: u64 = reg::QUEUE_NOTIFY;

    /// Puts a device in, as after power-on.
    pub fn insert(
        &self,
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
    ) -> Result<(), SlotError> {
        let mut inner = self.lock();
        self.check_fit(&inner, device.as_ref())?;
        self.show_metrics(Some(device.counters()));
        inner.put(device, memory);
        Ok(())
    }

    /// Puts a device in and makes it go on from saved state. The state is not trusted; if it is refused
    /// the slot stays empty.
    pub fn restore(
        &self,
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        state: SlotState,
    ) -> Result<(), SlotError> {
        let mut inner = self.lock();
        self.check_fit(&inner, device.as_ref())?;
        self.show_metrics(Some(device.counters()));
        inner.put(device, memory);
        let SlotState::V1(state) = state;
        if let Err(source) = self.restore_inner(&mut inner, state) {
            *inner = Inner::empty();
            self.show_metrics(None);
            self.interrupt.reset();
            return Err(SlotError::State {
                slot: self.slot,
                source,
            });
        }
        Ok(())
    }

    /// Makes the device in the slot go on from state it was in before. To be called with the loop paused
    /// and the vCPUs stopped; if the state is refused the device is stopped.
    pub fn rewind(&self, state: SlotState) -> Result<(), SlotError> {
        let mut inner = self.lock();
        if let Some(device) = inner.device.as_deref_mut() {
            device.reset();
        }
        self.interrupt.reset();
        let SlotState::V1(state) = state;
        self.restore_inner(&mut inner, state)
            .map_err(|source| SlotError::State {
                slot: self.slot,
                source,
            })
    }

    /// Takes the device out, stopped. The slot is empty afterwards.
    pub fn remove(&self) -> Option<Box<dyn VirtioDevice>> {
        let mut inner = self.lock();
        let mut device = std::mem::replace(&mut *inner, Inner::empty()).device?;
        device.reset();
        self.show_metrics(None);
        self.interrupt.reset();
        Some(device)
    }

    /// The slot's state; none if it is empty. To be called with the loop paused and the vCPUs stopped.
    pub fn save(&self) -> Option<SlotState> {
        let inner = self.lock();
        let device = inner.device.as_deref()?;
        let queues = match device.activation() {
            Some(active) => active.queues.iter().map(QueueSnapshot::from).collect(),
            None => inner.queues.clone(),
        };
        Some(SlotState::V1(SlotStateV1 {
            device_type: device.device_type(),
            status: inner.status,
            device_features_sel: inner.device_features_sel,
            driver_features_sel: inner.driver_features_sel,
            driver_features: inner.driver_features,
            queue_sel: inner.queue_sel,
            interrupt_status: self.interrupt.status(),
            config_generation: self.interrupt.generation(),
            queues,
            device: device.save(),
        }))
    }

    /// Works on the device in the slot, if there is one of type `T`.
    pub fn with<T: VirtioDevice, R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        let mut inner = self.lock();
        let device: &mut dyn Any = inner.device.as_deref_mut()?;
        device.downcast_mut::<T>().map(work)
    }

    fn show_metrics(&self, metrics: Option<Arc<dyn Counters>>) {
        *self
            .device_metrics
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = metrics;
    }

    /// Adds the slot's counters under `name`. Takes no lock that a device holds while it works.
    pub fn counters(&self, name: &str, out: &mut Vec<(String, u64)>) {
        let device = self
            .device_metrics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut push =
            |counter: &'static str, value| out.push((format!("{name}.{counter}"), value));
        self.metrics.visit(&mut push);
        if let Some(device) = device {
            device.visit(&mut push);
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_fit(&self, inner: &Inner, device: &dyn VirtioDevice) -> Result<(), SlotError> {
        if inner.device.is_some() {
            return Err(SlotError::Taken { slot: self.slot });
        }
        let wanted = device.queue_sizes().len();
        if wanted > self.doorbells.len() {
            return Err(SlotError::Queues {
                slot: self.slot,
                wanted,
            });
        }
        Ok(())
    }

    fn restore_inner(&self, inner: &mut Inner, state: SlotStateV1) -> Result<(), RestoreError> {
        let Some(device) = inner.device.as_deref_mut() else {
            return Ok(());
        };
        if state.device_type != device.device_type() {
            return Err(RestoreError::WrongDevice {
                found: state.device_type,
                wanted: device.device_type(),
            });
        }
        let wanted = device.queue_sizes().len();
        if state.queues.len() != wanted {
            return Err(RestoreError::QueueCount {
                found: state.queues.len(),
                wanted,
            });
        }
        check_status(state.status)?;
        let offered = device.features();
        if state.status & status::FEATURES_OK != 0 && state.driver_features & !offered != 0 {
            return Err(RestoreError::Features {
                found: state.driver_features,
                offered,
            });
        }
        device.restore(state.device)?;
        inner.status = state.status;
        inner.device_features_sel = state.device_features_sel;
        inner.driver_features_sel = state.driver_features_sel;
        inner.driver_features = state.driver_features;
        inner.queue_sel = state.queue_sel;
        inner.queues = state.queues;
        let stopped = status::NEEDS_RESET | status::FAILED;
        if inner.status & status::DRIVER_OK != 0 && inner.status & stopped == 0 {
            self.activate(inner)?;
        }
        self.interrupt
            .restore(state.interrupt_status, state.config_generation);
        // Doorbells that rang in the saved machine rang in another process.
        for doorbell in self.doorbells.iter() {
            let _ = doorbell.signal();
        }
        Ok(())
    }

    fn activate(&self, inner: &mut Inner) -> Result<(), RestoreError> {
        let (Some(device), Some(memory)) = (inner.device.as_deref_mut(), &inner.memory) else {
            return Ok(());
        };
        let event_idx = inner.driver_features & feature::EVENT_IDX != 0;
        let queues = inner
            .queues
            .iter()
            .zip(device.queue_sizes())
            .map(|(queue, &max)| queue.build(max, event_idx, memory))
            .collect::<Result<Vec<_>, _>>()?;
        let activation = Activation {
            memory: memory.clone(),
            queues,
            interrupt: Arc::clone(&self.interrupt),
            features: inner.driver_features,
            events: self.registrar.clone(),
            doorbells: Arc::clone(&self.doorbells),
        };
        device.activate(activation).map_err(RestoreError::Activate)
    }

    /// Stops the device and sets `NEEDS_RESET`, until the driver resets it.
    fn fail(&self, inner: &mut Inner, error: &(dyn std::error::Error + 'static)) {
        self.metrics.failures.inc();
        if let Some(device) = inner.device.as_deref_mut() {
            device.reset();
        }
        inner.status |= status::NEEDS_RESET;
        if inner.status & status::DRIVER_OK != 0 {
            self.interrupt.config_change();
        }
        if let Some(swallowed) = inner.log.pass() {
            let reason = forkd_types::chain(error);
            tracing::warn!(slot = ?self.slot, reason, swallowed, "a virtio device stands still");
            self.events.device_failed(self.slot, &reason);
        }
    }

    pub(super) fn write_status(&self, inner: &mut Inner, value: u32) {
        if value == 0 {
            self.metrics.resets.inc();
            inner.reset();
            self.interrupt.reset();
            return;
        }
        // Bits are only ever added; a driver that takes one back has lost its way.
        if value & !status::DRIVER_BITS & !status::NEEDS_RESET != 0
            || inner.status & !status::NEEDS_RESET & !value != 0
        {
            self.metrics.bad_accesses.inc();
            return;
        }
        let added = value & status::DRIVER_BITS & !inner.status;
        if added & status::FAILED != 0 {
            if let Some(device) = inner.device.as_deref_mut() {
                device.reset();
            }
            inner.status |= status::FAILED;
            return;
        }
        inner.status |= added & (status::ACKNOWLEDGE | status::DRIVER);
        if added & status::FEATURES_OK != 0 && inner.features_fit() {
            inner.status |= status::FEATURES_OK;
        }
        if added & status::DRIVER_OK != 0 {
            self.driver_ok(inner);
        }
    }

    fn driver_ok(&self, inner: &mut Inner) {
        let ready = status::NEGOTIATED;
        if inner.status & (ready | status::NEEDS_RESET | status::FAILED) != ready {
            self.metrics.bad_accesses.inc();
            return;
        }
        inner.status |= status::DRIVER_OK;
        match self.activate(inner) {
            Ok(()) => self.metrics.activations.inc(),
            Err(RestoreError::Activate(error)) => self.fail(inner, &error),
            Err(error) => self.fail(inner, &error),
        }
    }

    pub(super) fn write_queue(&self, inner: &mut Inner, offset: u64, value: u32) {
        if inner.status & status::DRIVER_OK != 0 {
            // A queue that moves under a running device.
            if inner.status & status::NEEDS_RESET == 0 {
                let error = DeviceError::Protocol("a queue was set up anew while in use");
                self.fail(inner, &error);
            }
            return;
        }
        let negotiated = inner.status & status::NEGOTIATED == status::NEGOTIATED;
        let Some(queue) = inner.selected().filter(|_| negotiated) else {
            self.metrics.bad_accesses.inc();
            return;
        };
        match offset {
            reg::QUEUE_READY => queue.ready = value & 1 != 0,
            // Setting up ends with "ready".
            _ if queue.ready => self.metrics.bad_accesses.inc(),
            // A size that does not fit in a queue is refused when the driver says it is ready.
            reg::QUEUE_NUM => queue.size = u16::try_from(value).unwrap_or(0),
            reg::QUEUE_DESC_LOW => set_low(&mut queue.desc_table, value),
            reg::QUEUE_DESC_HIGH => set_high(&mut queue.desc_table, value),
            reg::QUEUE_DRIVER_LOW => set_low(&mut queue.avail_ring, value),
            reg::QUEUE_DRIVER_HIGH => set_high(&mut queue.avail_ring, value),
            reg::QUEUE_DEVICE_LOW => set_low(&mut queue.used_ring, value),
            _ => set_high(&mut queue.used_ring, value),
        }
    }
}

impl EventTarget for MmioTransport {
    fn on_event(&self, token: u32, ready: Ready) {
        let queue = usize::try_from(token)
            .ok()
            .filter(|_| token < FIRST_DEVICE_TOKEN);
        if let Some(doorbell) = queue.and_then(|queue| self.doorbells.get(queue)) {
            doorbell.take();
        }
        let mut inner = self.lock();
        let Some(device) = inner.device.as_deref_mut() else {
            return;
        };
        if device.activation().is_none() {
            return;
        }
        let result = match queue {
            Some(queue) if queue >= device.queue_sizes().len() => Ok(()),
            Some(queue) => device.on_queue(queue),
            None => device.on_event(token, ready),
        };
        if let Err(error) = result {
            self.fail(&mut inner, &error);
        }
    }
}

fn check_status(value: u32) -> Result<(), RestoreError> {
    let known = value & !(status::DRIVER_BITS | status::NEEDS_RESET) == 0;
    let ordered = value & status::DRIVER_OK == 0 || value & status::RUNNING == status::RUNNING;
    if known && ordered {
        Ok(())
    } else {
        Err(RestoreError::Status { status: value })
    }
}
