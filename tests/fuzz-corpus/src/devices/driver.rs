//! A driver that is controlled by the input.
//!
//! The driver adds chains, rings doorbells, and saves and restores the device. [`Driver::finish`] checks the
//! invariants at the end.

use forkd_devices::testing::{Descriptor, MEMORY, QUEUE_SIZE, Rig};
use forkd_devices::virtio::MmioTransport;
use forkd_vmm_proto::DeviceSlot;
use vm_memory::{Bytes, GuestAddress};

use super::hosts::Host;
use crate::input::Input;

const MAX_STEPS: usize = 96;
const EVENT_IDX: u64 = 1 << 29;

/// A driver, the device it drives, and the host behind it.
pub(super) struct Driver<'a, H: Host> {
    rig: Rig,
    host: H,
    input: Input<'a>,
    queues: usize,
}

impl<'a, H: Host> Driver<'a, H> {
    pub(super) fn new(slot: DeviceSlot, mut host: H, data: &'a [u8]) -> Self {
        let mut input = Input::new(data);
        let mut rig = Rig::new(slot);
        let device = host.device(&rig);
        let queues = device.queue_sizes().len();
        let mask = match input.u8() % 4 {
            0 => u64::MAX,
            1 => !EVENT_IDX,
            2 => EVENT_IDX | 1 << 32,
            _ => !(1 << 15),
        };
        rig.start_with(device, mask);
        Self {
            rig,
            host,
            input,
            queues,
        }
    }

    pub(super) fn run(mut self) {
        for _ in 0..MAX_STEPS {
            if self.input.is_empty() {
                break;
            }
            self.step();
        }
        self.finish();
    }

    fn step(&mut self) {
        let queue = usize::from(self.input.u8()) % self.queues;
        match self.input.u8() % 12 {
            0..=3 => self.add_chain(queue),
            4 => self.rig.kick(queue),
            5 => self.write_memory(),
            6 => self.write_descriptor(queue),
            7 => {
                let index = self.input.u16();
                self.rig.set_avail_index(queue, index);
                self.rig.kick(queue);
            }
            8 => {
                let offset = u64::from(self.input.u16() % 0x200) & !3;
                let value = self.input.u32();
                self.rig.set(offset, value);
                self.rig.settle();
            }
            9 => {
                let mut input = Input::new(self.input.bytes(16));
                self.host_acts(&mut input);
            }
            10 => self.restore(),
            _ => self.rig.bring_up(u64::MAX, self.queues),
        }
    }

    /// Adds a well-formed chain with buffer sizes from the input.
    fn add_chain(&mut self, queue: usize) {
        let shape = self.input.u8();
        let mut readable = Vec::new();
        for _ in 0..shape & 3 {
            let len = usize::from(self.input.u8());
            let data = self.input.bytes(len).to_vec();
            readable.push((self.rig.buffer(&data), data.len()));
        }
        let mut writable = Vec::new();
        for _ in 0..shape >> 2 & 3 {
            let len = usize::from(self.input.u16() % 8192);
            writable.push((self.rig.buffer(&vec![0; len]), len));
        }
        if readable.is_empty() && writable.is_empty() {
            return;
        }
        self.rig.add_at(queue, &readable, &writable);
        if shape & 0x80 == 0 {
            self.rig.kick(queue);
        }
    }

    fn write_memory(&mut self) {
        let addr = u64::from(self.input.u32()) % MEMORY as u64;
        let len = usize::from(self.input.u8());
        let data = self.input.bytes(len);
        // Writes past the end of memory fail, which is intended.
        let _ = self.rig.memory.write_slice(data, GuestAddress(addr));
    }

    fn write_descriptor(&mut self, queue: usize) {
        let index = self.input.u16() % QUEUE_SIZE;
        let descriptor = Descriptor {
            addr: self.input.u64() & 0x8000_0000_00ff_ffff,
            len: self.input.u32(),
            flags: self.input.u16(),
            next: self.input.u16(),
        };
        self.rig.describe(queue, index, descriptor);
        if self.input.u8() & 1 == 1 {
            self.rig.offer(queue, index);
            self.rig.kick(queue);
        }
    }

    pub(super) fn host_acts(&mut self, input: &mut Input<'_>) {
        self.host.act(&self.rig, input);
        self.rig.settle();
    }

    /// Offers buffers for the device to write to.
    pub(super) fn post(&mut self, queue: usize, count: usize, size: usize) {
        for _ in 0..count {
            self.rig.add(queue, &[], &[size]);
        }
        self.rig.kick(queue);
    }

    /// Sends bytes in one buffer.
    pub(super) fn send(&mut self, queue: usize, data: &[u8]) {
        self.rig.add(queue, &[data], &[]);
        self.rig.kick(queue);
    }

    /// Saves the device and restores it. Saved state must be accepted.
    pub(super) fn restore(&mut self) {
        let device = self.host.device(&self.rig);
        match self.rig.restore_into(device) {
            Ok(rig) => self.rig = rig,
            Err(error) => panic!("state that was just saved is refused: {error:?}"),
        }
        self.rig.settle();
    }

    /// Checks that the device thread has nothing left to do.
    pub(super) fn finish(self) {
        self.rig.settle();
        let events = self.rig.event_loop.poll_once();
        assert!(matches!(events, Ok(0)), "the device spins: {events:?}");
    }

    /// Overwrites all driver memory with the input, then rings the doorbell.
    pub(super) fn run_raw(self, data: &[u8]) {
        let (table, avail, used) = forkd_devices::testing::ring_addresses(0);
        let mut input = Input::new(data);
        let rings = [
            (table, 16 * usize::from(QUEUE_SIZE)),
            (avail, 6 + 2 * usize::from(QUEUE_SIZE)),
        ];
        for (addr, len) in rings {
            let _ = self
                .rig
                .memory
                .write_slice(input.bytes(len), GuestAddress(addr));
        }
        let indirect = input.rest();
        let _ = self
            .rig
            .memory
            .write_slice(indirect, GuestAddress(used + 0x1000));
        self.rig.set(MmioTransport::NOTIFY_OFFSET, 0);
        self.finish();
    }
}
