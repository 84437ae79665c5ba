//! The driver's side of a device, for tests and fuzz targets.
//!
//! [`Rig`] sets up a slot through its registers, fills rings and reads them back. Its event loop has no thread;
//! a test runs it step by step.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use forkd_vmm_proto::DeviceSlot;
use vm_memory::{Bytes, GuestAddress};

use crate::bus::BusDevice;
use crate::virtio::{MmioTransport, SlotError, SlotState, VirtioDevice};
use crate::{DeviceEvents, EventLoop, GuestMemory};

/// Entries of each ring.
pub const QUEUE_SIZE: u16 = 64;
/// Size of guest memory.
pub const MEMORY: usize = 4 << 20;
/// Where buffers begin; rings are below.
pub const BUFFERS: u64 = 0x4_0000;

const STATUS: u64 = 0x70;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// Records the events of devices.
#[derive(Debug, Default)]
pub struct Recorder(Mutex<Recorded>);

/// The events of devices so far.
#[derive(Debug, Default)]
pub struct Recorded {
    /// How often the agent was ready.
    pub ready: u32,
    /// Streams from the guest, by port.
    pub streams: Vec<(u32, OwnedFd)>,
    pub failures: Vec<(DeviceSlot, String)>,
}

impl Recorder {
    /// The recorded events, to read and to take.
    pub fn get(&self) -> std::sync::MutexGuard<'_, Recorded> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceEvents for Recorder {
    fn agent_ready(&self) {
        self.get().ready += 1;
    }

    fn vsock_connect(&self, port: u32, stream: OwnedFd) {
        self.get().streams.push((port, stream));
    }

    fn device_failed(&self, slot: DeviceSlot, reason: &str) {
        self.get().failures.push((slot, reason.to_owned()));
    }
}

/// A descriptor as a driver writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest physical address.
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    /// The next one.
    pub next: u16,
}

#[derive(Debug, Default, Clone, Copy)]
struct DriverQueue {
    next_desc: u16,
    avail: u16,
    seen_used: u16,
}

/// A slot with a driver.
pub struct Rig {
    pub memory: GuestMemory,
    /// The loop, without a thread.
    pub event_loop: EventLoop,
    pub transport: Arc<MmioTransport>,
    pub events: Arc<Recorder>,
    queues: Vec<DriverQueue>,
    next_buffer: u64,
    first_buffer: u64,
}

/// Where a ring lies: descriptors, available, used.
pub fn ring_addresses(queue: usize) -> (u64, u64, u64) {
    let base = 0x1000 + queue as u64 * 0x3000;
    (base, base + 0x1000, base + 0x2000)
}

impl Rig {
    /// An empty slot.
    pub fn new(slot: DeviceSlot) -> Self {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY)])
            .unwrap_or_else(|e| unreachable!("guest memory of a test: {e}"));
        Self::with_memory(slot, memory)
    }

    /// An empty slot over memory that exists already.
    pub fn with_memory(slot: DeviceSlot, memory: GuestMemory) -> Self {
        let recorder = Arc::new(Recorder::default());
        let events: Arc<dyn DeviceEvents> = Arc::clone(&recorder) as _;
        let mut event_loop =
            EventLoop::new().unwrap_or_else(|e| unreachable!("the loop of a test: {e}"));
        let transport = event_loop
            .add(|registrar| MmioTransport::new(slot, registrar, events))
            .unwrap_or_else(|e| unreachable!("the slot of a test: {e}"));
        event_loop
            .handle()
            .resume()
            .unwrap_or_else(|e| unreachable!("the loop of a test: {e}"));
        Self {
            memory,
            event_loop,
            queues: vec![DriverQueue::default(); transport.doorbells().len()],
            transport,
            events: recorder,
            next_buffer: BUFFERS,
            first_buffer: BUFFERS,
        }
    }

    /// Puts a device in and brings it up with all features it offers.
    pub fn start(&mut self, device: Box<dyn VirtioDevice>) {
        self.start_with(device, u64::MAX);
    }

    /// Puts a device in and brings it up with those of its features that are in `mask`.
    pub fn start_with(&mut self, device: Box<dyn VirtioDevice>, mask: u64) {
        let queues = device.queue_sizes().len();
        if self.transport.insert(device, self.memory.clone()).is_err() {
            return;
        }
        self.bring_up(mask, queues);
    }

    /// Brings the device up, with `queues` queues.
    pub fn bring_up(&mut self, mask: u64, queues: usize) {
        self.set(STATUS, 0);
        self.set(STATUS, 1);
        self.set(STATUS, 3);
        for half in 0..2 {
            self.set(0x14, half);
            let offered = self.get(0x10);
            self.set(0x24, half);
            self.set(0x20, offered & (mask >> (32 * half)) as u32);
        }
        self.set(STATUS, 11);
        for queue in 0..queues {
            self.set_up_queue(queue);
        }
        self.set(STATUS, 15);
    }

    fn set_up_queue(&mut self, queue: usize) {
        let (desc, avail, used) = ring_addresses(queue);
        self.set(0x30, queue as u32);
        self.set(0x38, u32::from(QUEUE_SIZE));
        for (register, address) in [(0x80, desc), (0x90, avail), (0xa0, used)] {
            self.set(register, address as u32);
            self.set(register + 4, (address >> 32) as u32);
        }
        self.set(0x44, 1);
        self.queues[queue] = DriverQueue::default();
        let _ = self.memory.write_slice(&[0; 0x2000], GuestAddress(avail));
    }

    /// Reads a register.
    pub fn get(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.transport.read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a register.
    pub fn set(&self, offset: u64, value: u32) {
        self.transport.write(offset, &value.to_le_bytes());
    }

    /// The device status register.
    pub fn status(&self) -> u32 {
        self.get(STATUS)
    }

    /// Whether the device has failed.
    pub fn needs_reset(&self) -> bool {
        self.status() & 64 != 0
    }

    /// Keeps the buffers made so far for good; later ones are used again and again.
    pub fn pin(&mut self) {
        self.first_buffer = self.next_buffer;
    }

    /// A new buffer in guest memory that holds `data`.
    pub fn buffer(&mut self, data: &[u8]) -> u64 {
        let addr = self.next_buffer;
        let size = (data.len() as u64 + 15) & !15;
        if addr + size > MEMORY as u64 {
            self.next_buffer = self.first_buffer;
            return self.buffer(data);
        }
        self.next_buffer += size;
        let _ = self.memory.write_slice(data, GuestAddress(addr));
        addr
    }

    /// Reads guest memory.
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        let _ = self.memory.read_slice(&mut data, GuestAddress(addr));
        data
    }

    /// Writes a descriptor into the table.
    pub fn describe(&self, queue: usize, index: u16, descriptor: Descriptor) {
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&descriptor.addr.to_le_bytes());
        raw[8..12].copy_from_slice(&descriptor.len.to_le_bytes());
        raw[12..14].copy_from_slice(&descriptor.flags.to_le_bytes());
        raw[14..].copy_from_slice(&descriptor.next.to_le_bytes());
        let (table, _, _) = ring_addresses(queue);
        let _ = self
            .memory
            .write_slice(&raw, GuestAddress(table + 16 * u64::from(index)));
    }

    /// Makes a chain available: `out` buffers for the device to read, then rooms of the sizes `room` for
    /// it to write. Returns the head and the addresses of the rooms.
    pub fn add(&mut self, queue: usize, out: &[&[u8]], room: &[usize]) -> (u16, Vec<u64>) {
        let readable: Vec<(u64, usize)> = out
            .iter()
            .map(|data| (self.buffer(data), data.len()))
            .collect();
        let writable: Vec<(u64, usize)> = room
            .iter()
            .map(|&len| (self.buffer(&vec![0; len]), len))
            .collect();
        let head = self.add_at(queue, &readable, &writable);
        (head, writable.into_iter().map(|(addr, _)| addr).collect())
    }

    /// Makes a chain of buffers at given places available.
    pub fn add_at(
        &mut self,
        queue: usize,
        readable: &[(u64, usize)],
        writable: &[(u64, usize)],
    ) -> u16 {
        let head = self.queues[queue].next_desc;
        let count = readable.len() + writable.len();
        let all = readable
            .iter()
            .map(|b| (b, 0))
            .chain(writable.iter().map(|b| (b, WRITE)));
        let mut index = head;
        for (n, (&(addr, len), flag)) in all.enumerate() {
            let next = (index + 1) % QUEUE_SIZE;
            let descriptor = Descriptor {
                addr,
                len: len as u32,
                flags: if n + 1 < count { flag | NEXT } else { flag },
                next,
            };
            self.describe(queue, index, descriptor);
            index = next;
        }
        self.queues[queue].next_desc = index;
        self.offer(queue, head);
        head
    }

    /// Puts a head into the available ring.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let (_, avail, _) = ring_addresses(queue);
        let index = self.queues[queue].avail;
        let slot = avail + 4 + 2 * u64::from(index % QUEUE_SIZE);
        let _ = self
            .memory
            .write_slice(&head.to_le_bytes(), GuestAddress(slot));
        self.set_avail_index(queue, index.wrapping_add(1));
        // Ask for an interrupt with every buffer.
        let used_event = avail + 4 + 2 * u64::from(QUEUE_SIZE);
        let _ = self
            .memory
            .write_slice(&index.to_le_bytes(), GuestAddress(used_event));
    }

    /// Sets the index of the available ring.
    pub fn set_avail_index(&mut self, queue: usize, index: u16) {
        let (_, avail, _) = ring_addresses(queue);
        self.queues[queue].avail = index;
        let _ = self
            .memory
            .write_slice(&index.to_le_bytes(), GuestAddress(avail + 2));
    }

    /// Rings a doorbell and lets the device work until nothing is ready.
    pub fn kick(&self, queue: usize) {
        self.set(MmioTransport::NOTIFY_OFFSET, queue as u32);
        self.settle();
    }

    /// Lets the device work until nothing is ready.
    pub fn settle(&self) {
        for _ in 0..10_000 {
            match self.event_loop.poll_once() {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    /// The next used element: head and length.
    pub fn used(&mut self, queue: usize) -> Option<(u32, u32)> {
        let (_, _, used) = ring_addresses(queue);
        let index = u16::from_le_bytes(self.read(used + 2, 2).try_into().ok()?);
        let state = &mut self.queues[queue];
        if state.seen_used == index {
            return None;
        }
        let slot = used + 4 + 8 * u64::from(state.seen_used % QUEUE_SIZE);
        state.seen_used = state.seen_used.wrapping_add(1);
        let element = self.read(slot, 8);
        let word = |at: usize| {
            element[at..at + 4]
                .try_into()
                .map(u32::from_le_bytes)
                .unwrap_or_default()
        };
        Some((word(0), word(4)))
    }

    /// Saves the slot and puts `device` into a new slot over the same memory, going on from that state.
    pub fn restore_into(&self, device: Box<dyn VirtioDevice>) -> Result<Self, SlotError> {
        let Some(state) = self.transport.save() else {
            return Ok(Self::new(self.transport.slot()));
        };
        self.restore_state_into(device, state)
    }

    /// Puts `device` into a new slot over the same memory, going on from `state`.
    pub fn restore_state_into(
        &self,
        device: Box<dyn VirtioDevice>,
        state: SlotState,
    ) -> Result<Self, SlotError> {
        let mut rig = Self::with_memory(self.transport.slot(), self.memory.clone());
        rig.transport.restore(device, rig.memory.clone(), state)?;
        rig.queues.clone_from(&self.queues);
        rig.next_buffer = self.next_buffer;
        rig.first_buffer = self.first_buffer;
        Ok(rig)
    }

    /// A counter of the slot or its device.
    pub fn counter(&self, name: &str) -> u64 {
        let mut out = Vec::new();
        self.transport.counters("x", &mut out);
        let wanted = format!("x.{name}");
        out.into_iter()
            .find(|(name, _)| *name == wanted)
            .map_or(0, |(_, value)| value)
    }
}
