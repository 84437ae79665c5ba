//! The devices of one machine and their event loops.
//!
//! [`DeviceSet`] makes all slots, ports and interrupt lines while the shell is built; a boot or restore puts
//! devices into the slots. Disks have an event loop, and so a thread, of their own ([`DeviceLoops`]). A pause
//! stops both loops between two requests.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use forkd_devices::bus::{Bus, BusError};
use forkd_devices::disk::Disk;
use forkd_devices::legacy::{Console, SERIAL_BASE, SERIAL_IRQ, SERIAL_LEN, Serial};
use forkd_devices::virtio::balloon::Balloon;
use forkd_devices::virtio::block::Block;
use forkd_devices::virtio::net::Net;
use forkd_devices::virtio::rng::Rng;
use forkd_devices::virtio::vsock::Vsock;
use forkd_devices::virtio::{MMIO_WINDOW, MmioTransport, SlotError, VirtioDevice};
use forkd_devices::{DeviceEvents, EventFd, EventLoop, LoopHandle, MemoryReclaim};
use forkd_memory::GuestRam;
use forkd_vmm_proto::{
    ConsoleSpec, DeviceSlot, DiskSpec, NetAttachment, NetBackend, NetSpec, READY_IO_PORT,
    RateLimit, VsockSpec,
};
use thiserror::Error;

use super::ports::{PanicPort, PowerRegisters, ReadyPort};
use super::vcpu::Buses;
use super::{FdError, Fds, Notices};
use crate::arch::x86_64::layout;
use crate::kvm::{KvmError, Vm};
use crate::state::SlotPart;

/// Why a machine's devices are not what was asked for.
#[derive(Debug, Error)]
pub enum DeviceSetError {
    /// The kernel refused a descriptor.
    #[error("cannot set up the device thread")]
    Io(#[source] io::Error),
    /// Two devices at one address.
    #[error("the devices do not fit the address space")]
    Bus(#[from] BusError),
    /// KVM refused a doorbell or an interrupt.
    #[error("cannot connect a device to KVM")]
    Kvm(#[from] KvmError),
    /// A descriptor is missing.
    #[error("a device lacks its descriptor")]
    Fd(#[from] FdError),
    /// Too many disks.
    #[error("{count} disks are more than there are slots for")]
    TooManyDisks { count: usize },
    /// A back end cannot be used.
    #[error("the device {slot:?} cannot use its back end")]
    Backend {
        slot: DeviceSlot,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A device does not fit its slot, or its state is refused.
    #[error("a device cannot be put in")]
    Slot(#[from] SlotError),
    /// There is no such device.
    #[error("there is no device in the slot {slot:?}")]
    Absent { slot: DeviceSlot },
    /// The state speaks of other devices than the request.
    #[error("the snapshot and the request differ in the device {slot:?}: the {where_} has it")]
    Differs {
        slot: DeviceSlot,
        /// "snapshot" or "request".
        where_: &'static str,
    },
    /// The serial port's state is refused.
    #[error("the state of the serial port is refused")]
    Serial(#[source] forkd_devices::virtio::RestoreError),
}

/// The devices as a boot or restore describes them.
pub struct DeviceSpec<'a> {
    /// Disks in slot order.
    pub disks: &'a [DiskSpec],
    pub net: &'a NetSpec,
    /// Hardware address of a network device that is not restored.
    pub mac: [u8; 6],
    pub vsock: &'a VsockSpec,
    pub console: &'a ConsoleSpec,
}

/// A device and the slot it goes into.
type Fitted = (DeviceSlot, Box<dyn VirtioDevice>);

/// The event loops of a machine, each for a thread of its own.
///
/// Disks do their I/O synchronously, and a flush may take the host seconds. They have a thread of their own
/// so that commands to the agent (vsock), the console and the network do not wait for it.
pub struct DeviceLoops {
    /// Everything but disks.
    pub devices: EventLoop,
    pub disks: EventLoop,
}

/// Slots, ports and lines; devices come later.
pub struct DeviceSet {
    slots: Vec<Arc<MmioTransport>>,
    serial: Arc<Serial>,
    generation_line: EventFd,
    power_button: EventFd,
    /// One for each of [`DeviceLoops`].
    handles: [LoopHandle; 2],
    buses: Arc<Buses>,
    notices: Arc<Notices>,
}

impl DeviceSet {
    /// Empty slots, connected to KVM; and the loops for the device threads.
    pub fn new(vm: &Vm, notices: &Arc<Notices>) -> Result<(Self, DeviceLoops), DeviceSetError> {
        let mut loops = DeviceLoops {
            devices: EventLoop::new().map_err(DeviceSetError::Io)?,
            disks: EventLoop::new().map_err(DeviceSetError::Io)?,
        };
        let events = Arc::clone(notices) as Arc<dyn DeviceEvents>;
        let mut memory = Bus::new();
        let mut slots = Vec::with_capacity(layout::SLOTS.len());
        for (place, slot) in layout::SLOTS.into_iter().enumerate() {
            let own_loop = match slot {
                DeviceSlot::Disk(_) => &mut loops.disks,
                _ => &mut loops.devices,
            };
            let transport = own_loop
                .add(|registrar| MmioTransport::new(slot, registrar, Arc::clone(&events)))
                .map_err(DeviceSetError::Io)?;
            let window = layout::window(place);
            for (queue, bell) in (0..).zip(transport.doorbells()) {
                let address = window + MmioTransport::NOTIFY_OFFSET;
                vm.add_doorbell(bell.as_fd(), address, queue)?;
            }
            let line = transport.interrupt().line();
            vm.add_interrupt(line.as_fd(), layout::slot_gsi(place))?;
            memory.insert(window, MMIO_WINDOW, transport.clone())?;
            slots.push(transport);
        }
        let serial = loops.devices.add(Serial::new).map_err(DeviceSetError::Io)?;
        vm.add_interrupt(serial.interrupt().as_fd(), SERIAL_IRQ)?;
        let generation_line = line(vm, layout::GENERATION_GSI)?;
        let power_button = line(vm, layout::POWER_BUTTON_GSI)?;

        let mut ports = Bus::new();
        ports.insert(SERIAL_BASE, SERIAL_LEN, serial.clone())?;
        let power = Arc::new(PowerRegisters(Arc::clone(notices)));
        ports.insert(u64::from(layout::POWER_PORT), 3, power)?;
        let panic = Arc::new(PanicPort(Arc::clone(notices)));
        ports.insert(u64::from(layout::PVPANIC_PORT), 1, panic)?;
        let ready = Arc::new(ReadyPort(Arc::clone(notices)));
        ports.insert(u64::from(READY_IO_PORT), 1, ready)?;

        let set = Self {
            slots,
            serial,
            generation_line,
            power_button,
            handles: [loops.devices.handle(), loops.disks.handle()],
            buses: Arc::new(Buses { ports, memory }),
            notices: Arc::clone(notices),
        };
        Ok((set, loops))
    }

    /// Where the guest's accesses go.
    pub fn buses(&self) -> Arc<Buses> {
        Arc::clone(&self.buses)
    }

    /// Asks all device threads to stop soon, and does not wait for it.
    pub fn ask_pause(&self) -> io::Result<()> {
        self.handles.iter().try_for_each(LoopHandle::ask_pause)
    }

    /// Waits until all device threads have stopped between two requests. Nothing is in flight then.
    pub fn pause(&self) -> io::Result<()> {
        self.handles.iter().try_for_each(LoopHandle::pause)
    }

    /// Lets all device threads go on.
    pub fn resume(&self) -> io::Result<()> {
        // A loop that fails to be woken must not keep the other one asleep.
        let results = self.handles.each_ref().map(LoopHandle::resume);
        results.into_iter().collect()
    }

    /// Puts fresh devices in; returns the places of the slots that have one.
    pub fn fill(
        &self,
        spec: &DeviceSpec<'_>,
        fds: &mut Fds,
        ram: &Arc<GuestRam>,
    ) -> Result<Vec<usize>, DeviceSetError> {
        let mut places = Vec::new();
        for (slot, device) in self.build(spec, fds, ram)? {
            let (place, transport) = self.slot(slot)?;
            transport.insert(device, ram.memory().clone())?;
            places.push(place);
        }
        places.sort_unstable();
        self.attach_console(spec.console, fds)?;
        Ok(places)
    }

    /// Puts devices in that go on from saved state.
    pub fn restore(
        &self,
        spec: &DeviceSpec<'_>,
        fds: &mut Fds,
        ram: &Arc<GuestRam>,
        mut saved: Vec<SlotPart>,
    ) -> Result<(), DeviceSetError> {
        for (slot, device) in self.build(spec, fds, ram)? {
            let at =
                saved
                    .iter()
                    .position(|part| part.slot == slot)
                    .ok_or(DeviceSetError::Differs {
                        slot,
                        where_: "request",
                    })?;
            let part = saved.swap_remove(at);
            let (_, transport) = self.slot(slot)?;
            transport.restore(device, ram.memory().clone(), part.state)?;
        }
        if let Some(left) = saved.first() {
            return Err(DeviceSetError::Differs {
                slot: left.slot,
                where_: "snapshot",
            });
        }
        self.attach_console(spec.console, fds)
    }

    fn attach_console(&self, spec: &ConsoleSpec, fds: &mut Fds) -> Result<(), DeviceSetError> {
        let console = Console {
            output: fds.take(spec.output)?,
            bytes_per_second: spec.bytes_per_second,
            max_bytes: spec.max_bytes,
        };
        self.serial.attach(console).map_err(DeviceSetError::Io)
    }

    fn slot(&self, slot: DeviceSlot) -> Result<(usize, &Arc<MmioTransport>), DeviceSetError> {
        self.slots
            .iter()
            .enumerate()
            .find(|(_, transport)| transport.slot() == slot)
            .ok_or(DeviceSetError::Absent { slot })
    }

    fn build(
        &self,
        spec: &DeviceSpec<'_>,
        fds: &mut Fds,
        ram: &Arc<GuestRam>,
    ) -> Result<Vec<Fitted>, DeviceSetError> {
        let mut devices: Vec<Fitted> = Vec::new();
        let rng = Rng::new(RateLimit::default()).map_err(backend(DeviceSlot::Rng))?;
        devices.push((DeviceSlot::Rng, Box::new(rng)));
        let balloon = Balloon::new(Arc::new(Reclaim(Arc::clone(ram))));
        devices.push((DeviceSlot::Balloon, Box::new(balloon)));
        let events = Arc::clone(&self.notices) as Arc<dyn DeviceEvents>;
        let vsock = Vsock::new(spec.vsock.cid, fds.take(spec.vsock.listener)?, events)
            .map_err(backend(DeviceSlot::Vsock))?;
        devices.push((DeviceSlot::Vsock, Box::new(vsock)));
        let net = Net::new(spec.mac, net_backend(spec.net.backend, fds)?, spec.net.rate)
            .map_err(backend(DeviceSlot::Net))?;
        devices.push((DeviceSlot::Net, Box::new(net)));
        for (number, disk) in (0u8..).zip(spec.disks) {
            let slot = DeviceSlot::Disk(number);
            if !layout::SLOTS.contains(&slot) {
                return Err(DeviceSetError::TooManyDisks {
                    count: spec.disks.len(),
                });
            }
            devices.push((slot, Box::new(build_disk(slot, disk, fds)?)));
        }
        Ok(devices)
    }

    /// The state of everything; with vCPUs and device thread stopped.
    pub fn save(&self) -> (Vec<SlotPart>, forkd_devices::legacy::SerialSnapshot) {
        let slots = self
            .slots
            .iter()
            .filter_map(|transport| {
                Some(SlotPart {
                    slot: transport.slot(),
                    state: transport.save()?,
                })
            })
            .collect();
        (slots, self.serial.save())
    }

    /// The serial port goes on from saved state.
    pub fn restore_serial(
        &self,
        state: forkd_devices::legacy::SerialSnapshot,
    ) -> Result<(), DeviceSetError> {
        self.serial.restore(state).map_err(DeviceSetError::Serial)
    }

    /// The devices go on from state they were in before.
    pub fn rewind(&self, saved: &[SlotPart]) -> Result<(), DeviceSetError> {
        for part in saved {
            let (_, transport) = self.slot(part.slot)?;
            transport.rewind(part.state.clone())?;
        }
        Ok(())
    }

    /// Tells the guest that its generation id has changed.
    pub fn announce_generation(&self) {
        // An eventfd that is open can always be raised.
        let _ = self.generation_line.signal();
    }

    /// Sets how much memory the balloon should take from the guest.
    pub fn set_balloon(&self, target_mib: u32) -> Result<(), DeviceSetError> {
        let slot = DeviceSlot::Balloon;
        let (_, transport) = self.slot(slot)?;
        transport
            .with(|balloon: &mut Balloon| balloon.set_target(target_mib))
            .ok_or(DeviceSetError::Absent { slot })
    }

    /// Exchanges the back end of the network device.
    pub fn set_net(
        &self,
        attachment: Option<NetAttachment>,
        fds: &mut Fds,
    ) -> Result<(), DeviceSetError> {
        let slot = DeviceSlot::Net;
        let new = net_backend(attachment, fds)?;
        let (_, transport) = self.slot(slot)?;
        transport
            .with(|net: &mut Net| net.set_backend(new))
            .ok_or(DeviceSetError::Absent { slot })?
            .map_err(backend(slot))
    }

    /// Gives an empty disk slot its disk and tells the guest of the new size.
    pub fn attach_disk(
        &self,
        number: u8,
        spec: &DiskSpec,
        fds: &mut Fds,
    ) -> Result<(), DeviceSetError> {
        let slot = DeviceSlot::Disk(number);
        let disk = open_disk(slot, spec, fds)?;
        let (_, transport) = self.slot(slot)?;
        transport
            .with(|block: &mut Block| block.attach(disk, &spec.serial))
            .ok_or(DeviceSetError::Absent { slot })?
            .map_err(backend(slot))?;
        transport.interrupt().config_change();
        Ok(())
    }

    /// Presses the power button.
    pub fn press_power_button(&self) {
        let _ = self.power_button.signal();
    }

    /// The writable disks, in slot order. A slot that waits for its disk is not among them.
    pub fn writable_disks(&self) -> Vec<&Arc<MmioTransport>> {
        self.slots
            .iter()
            .filter(|slot| {
                matches!(slot.slot(), DeviceSlot::Disk(_))
                    && slot.with(|block: &mut Block| !block.read_only() && !block.is_empty())
                        == Some(true)
            })
            .collect()
    }

    /// Gives a writable disk, counted in slot order, one layer in place of its frozen ones.
    pub fn merged_layer(&self, disk: u8, layer: File) -> Result<(), DeviceSetError> {
        let slot = DeviceSlot::Disk(disk);
        let transport = *self
            .writable_disks()
            .get(usize::from(disk))
            .ok_or(DeviceSetError::Absent { slot })?;
        transport
            .with(|block: &mut Block| block.take_merged(layer))
            .ok_or(DeviceSetError::Absent { slot })?
            .map_err(|source| DeviceSetError::Backend {
                slot: transport.slot(),
                source: source.into(),
            })
    }

    /// Writes out what the guest printed last.
    pub fn flush_console(&self) {
        self.serial.flush();
    }

    /// Asks the guest for memory statistics, which are in the counters a moment later.
    pub fn ask_for_memory_stats(&self) {
        if let Ok((_, balloon)) = self.slot(DeviceSlot::Balloon)
            && let Some(Err(error)) = balloon.with(|b: &mut Balloon| b.ask_for_stats())
        {
            tracing::warn!(%error, "the balloon gives no statistics");
        }
    }

    /// All counters, as [`forkd_vmm_proto::COUNTERS`] lists them. Waits for no device.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let mut out = Vec::new();
        for transport in &self.slots {
            transport.counters(&slot_name(transport.slot()), &mut out);
        }
        self.serial.counters("console", &mut out);
        let notices = &self.notices;
        for (name, counter) in [
            ("machine.ready_signals", &notices.ready_signals),
            ("machine.dropped_notices", &notices.dropped),
            ("machine.bus_locks", &notices.bus_locks),
        ] {
            out.push((name.to_owned(), counter.get()));
        }
        out
    }

    /// The queue of news.
    pub fn notices(&self) -> &Arc<Notices> {
        &self.notices
    }
}

/// Gives pages of the balloon back to the host.
struct Reclaim(Arc<GuestRam>);

impl MemoryReclaim for Reclaim {
    fn discard(&self, addr: u64, len: u64) -> io::Result<()> {
        self.0.discard(addr, len).map_err(io::Error::other)
    }
}

fn line(vm: &Vm, gsi: u32) -> Result<EventFd, DeviceSetError> {
    let line = EventFd::new().map_err(DeviceSetError::Io)?;
    vm.add_interrupt(line.as_fd(), gsi)?;
    Ok(line)
}

fn backend<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    slot: DeviceSlot,
) -> impl FnOnce(E) -> DeviceSetError {
    move |error| DeviceSetError::Backend {
        slot,
        source: error.into(),
    }
}

fn net_backend(
    attachment: Option<NetAttachment>,
    fds: &mut Fds,
) -> Result<Option<(OwnedFd, NetBackend)>, FdError> {
    attachment
        .map(|NetAttachment { fd, kind }| Ok((fds.take(fd)?, kind)))
        .transpose()
}

fn build_disk(slot: DeviceSlot, spec: &DiskSpec, fds: &mut Fds) -> Result<Block, DeviceSetError> {
    let disk = open_disk(slot, spec, fds)?;
    Block::new(disk, &spec.serial, spec.rate).map_err(backend(slot))
}

fn open_disk(
    slot: DeviceSlot,
    spec: &DiskSpec,
    fds: &mut Fds,
) -> Result<Box<dyn Disk>, DeviceSetError> {
    let base = fds.file(spec.base)?;
    let layers = spec
        .layers
        .iter()
        .map(|index| fds.file(*index))
        .collect::<Result<Vec<_>, _>>()?;
    forkd_devices::disk::open(base, layers, spec.read_only).map_err(backend(slot))
}

fn slot_name(slot: DeviceSlot) -> String {
    match slot {
        DeviceSlot::Rng => "rng".into(),
        DeviceSlot::Balloon => "balloon".into(),
        DeviceSlot::Vsock => "vsock".into(),
        DeviceSlot::Net => "net".into(),
        DeviceSlot::Disk(n) => format!("disk{n}"),
        DeviceSlot::Console => "console".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::Hypervisor;

    fn vm() -> Vm {
        let kvm = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .unwrap();
        Vm::new(&Hypervisor::from_fd(kvm.into()).unwrap()).unwrap()
    }

    #[test]
    fn disks_are_served_by_a_loop_of_their_own() {
        if !std::path::Path::new("/dev/kvm").exists() {
            eprintln!("no /dev/kvm on this host: nothing was tested");
            return;
        }
        let vm = vm();
        let (set, loops) = DeviceSet::new(&vm, &Notices::new().unwrap()).unwrap();
        set.resume().unwrap();
        for transport in &set.slots {
            transport.doorbells()[0].signal().unwrap();
            let woken = [&loops.devices, &loops.disks].map(|one| one.poll_once().unwrap());
            let expected = match transport.slot() {
                DeviceSlot::Disk(_) => [0, 1],
                _ => [1, 0],
            };
            assert_eq!(woken, expected, "{:?}", transport.slot());
        }
    }

    /// A pause waits for the request that a disk is in, and no loop runs after it.
    #[test]
    fn a_pause_stops_all_loops() {
        if !std::path::Path::new("/dev/kvm").exists() {
            eprintln!("no /dev/kvm on this host: nothing was tested");
            return;
        }
        let vm = vm();
        let (set, loops) = DeviceSet::new(&vm, &Notices::new().unwrap()).unwrap();
        let handles = set.handles.clone();
        let threads =
            [loops.devices, loops.disks].map(|one| std::thread::spawn(move || one.run().unwrap()));
        for _ in 0..100 {
            set.resume().unwrap();
            set.ask_pause().unwrap();
            set.pause().unwrap();
            assert!(handles.iter().all(LoopHandle::is_paused));
        }
        handles.iter().for_each(|handle| handle.stop().unwrap());
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
