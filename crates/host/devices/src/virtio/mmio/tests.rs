use std::cell::Cell;
use std::sync::Arc;

use forkd_vmm_proto::{DeviceSlot, RateLimit};
use proptest::prelude::*;

use crate::bus::BusDevice;
use crate::testing::{QUEUE_SIZE, Rig, ring_addresses};
use crate::virtio::rng::Rng;
use crate::virtio::{DeviceState, SlotError, SlotState, SlotStateV1, VirtioDevice};

const STATUS: u64 = 0x70;

fn rng() -> Box<dyn VirtioDevice> {
    Box::new(Rng::new(RateLimit::default()).unwrap())
}

fn started() -> Rig {
    let mut rig = Rig::new(DeviceSlot::Rng);
    rig.start(rng());
    rig
}

#[test]
fn an_empty_slot_shows_no_device() {
    let rig = Rig::new(DeviceSlot::Rng);
    assert_eq!(rig.get(0), u32::from_le_bytes(*b"virt"));
    assert_eq!(rig.get(4), 2);
    assert_eq!(rig.get(8), 0);
    rig.set(STATUS, 15);
    assert_eq!(rig.status(), 0);
    assert!(rig.transport.save().is_none());
    rig.transport.insert(rng(), rig.memory.clone()).unwrap();
    assert_eq!(rig.get(8), 4);
    assert!(matches!(
        rig.transport.insert(rng(), rig.memory.clone()),
        Err(SlotError::Taken { .. })
    ));
}

#[test]
fn features_that_are_not_offered_are_not_agreed_to() {
    let rig = Rig::new(DeviceSlot::Rng);
    rig.transport.insert(rng(), rig.memory.clone()).unwrap();
    rig.set(STATUS, 3);
    rig.set(0x24, 0);
    rig.set(0x20, 1);
    rig.set(0x24, 1);
    rig.set(0x20, 1);
    rig.set(STATUS, 11);
    assert_eq!(rig.status(), 3);
    rig.set(0x24, 0);
    rig.set(0x20, 0);
    rig.set(STATUS, 11);
    assert_eq!(rig.status(), 11);
    // A legacy driver, which does not accept version 1, is refused too.
    rig.set(STATUS, 0);
    rig.set(STATUS, 11);
    assert_eq!(rig.status(), 3);
}

#[test]
fn queues_are_set_up_only_between_features_and_ready() {
    let rig = Rig::new(DeviceSlot::Rng);
    rig.transport.insert(rng(), rig.memory.clone()).unwrap();
    rig.set(0x44, 1);
    assert_eq!(rig.get(0x44), 0);
    assert_eq!(rig.get(0x34), 64);
    rig.set(0x30, 1);
    assert_eq!(rig.get(0x34), 0);
    assert!(rig.counter("bad_accesses") >= 1);
}

#[test]
fn a_queue_that_moves_while_in_use_stops_the_device() {
    for register in [0x38, 0x44, 0x80, 0x94, 0xa0] {
        let rig = started();
        rig.set(register, 0);
        assert!(rig.needs_reset(), "{register:#x}");
        assert_eq!(rig.counter("failures"), 1);
        rig.set(register, 1);
        assert_eq!(rig.counter("failures"), 1);
        rig.set(STATUS, 0);
        assert_eq!(rig.status(), 0);
    }
}

#[test]
fn a_queue_outside_memory_stops_the_device_when_the_driver_is_ready() {
    for (register, value) in [(0x84, 1u32), (0x38, 3), (0x38, 0x10040), (0x80, 0x1001)] {
        let mut rig = Rig::new(DeviceSlot::Rng);
        rig.transport.insert(rng(), rig.memory.clone()).unwrap();
        rig.bring_up(u64::MAX, 0);
        rig.set(STATUS, 0);
        rig.set(STATUS, 3);
        rig.set(0x24, 1);
        rig.set(0x20, 1);
        rig.set(STATUS, 11);
        let (desc, avail, used) = ring_addresses(0);
        rig.set(0x38, u32::from(QUEUE_SIZE));
        for (at, addr) in [(0x80, desc), (0x90, avail), (0xa0, used)] {
            rig.set(at, addr as u32);
        }
        rig.set(register, value);
        rig.set(0x44, 1);
        rig.set(STATUS, 15);
        assert!(rig.needs_reset(), "{register:#x} {value:#x}");
    }
}

#[test]
fn a_driver_that_gives_up_stops_the_device() {
    let mut rig = started();
    rig.set(STATUS, 15 | 128);
    rig.add(0, &[], &[16]);
    rig.kick(0);
    assert_eq!(rig.used(0), None);
}

#[test]
fn failures_are_told_but_not_without_end() {
    let rig = started();
    for _ in 0..100 {
        rig.set(0x38, 0);
        rig.set(STATUS, 0);
        let mut again = Rig::with_memory(DeviceSlot::Rng, rig.memory.clone());
        again.transport = Arc::clone(&rig.transport);
        again.bring_up(u64::MAX, 1);
    }
    assert_eq!(rig.counter("failures"), 100);
    let told = rig.events.get().failures.len();
    assert!((1..20).contains(&told), "{told}");
}

#[test]
fn a_device_taken_out_leaves_an_empty_slot() {
    let rig = started();
    assert!(rig.transport.remove().is_some());
    assert_eq!(rig.get(8), 0);
    assert!(rig.transport.remove().is_none());
    rig.kick(0);
}

fn good_state() -> SlotStateV1 {
    let Some(SlotState::V1(state)) = started().transport.save() else {
        panic!("no state");
    };
    state
}

#[test]
fn state_that_makes_no_sense_is_refused_and_the_slot_stays_empty() {
    type Change = fn(&mut SlotStateV1);
    let changes: [Change; 10] = [
        |s| s.device_type = 2,
        |s| s.queues.clear(),
        |s| s.status = 4,
        |s| s.status = 0x100,
        |s| s.driver_features |= 1,
        |s| s.queues[0].size = 65,
        |s| s.queues[0].size = 0,
        |s| s.queues[0].desc_table = u64::MAX - 15,
        |s| s.queues[0].used_ring = 0x1001,
        |s| {
            s.device = DeviceState::Balloon(crate::virtio::balloon::BalloonState::V1 {
                target: 0,
                actual: 0,
            });
        },
    ];
    for (n, change) in changes.iter().enumerate() {
        let mut state = good_state();
        change(&mut state);
        let rig = Rig::new(DeviceSlot::Rng);
        let result = rig
            .transport
            .restore(rng(), rig.memory.clone(), SlotState::V1(state));
        assert!(matches!(result, Err(SlotError::State { .. })), "{n}");
        assert_eq!(rig.get(8), 0);
    }
}

#[test]
fn an_interrupt_on_its_way_is_raised_again() {
    let mut state = good_state();
    state.interrupt_status = 1;
    let rig = Rig::new(DeviceSlot::Rng);
    rig.transport
        .restore(rng(), rig.memory.clone(), SlotState::V1(state))
        .unwrap();
    assert!(rig.transport.interrupt().line().take());
    assert_eq!(rig.get(0x60), 1);
}

#[test]
fn a_device_thread_serves_while_it_runs_and_stands_still_while_paused() {
    let mut rig = started();
    rig.add(0, &[], &[16]);
    let event_loop = std::mem::replace(&mut rig.event_loop, crate::EventLoop::new().unwrap());
    let handle = event_loop.handle();
    let thread = std::thread::spawn(move || event_loop.run());
    handle.pause().unwrap();
    rig.set(0x50, 0);
    assert_eq!(rig.used(0), None);
    handle.resume().unwrap();
    while rig.used(0).is_none() {
        std::thread::yield_now();
    }
    handle.stop().unwrap();
    thread.join().unwrap().unwrap();
}

proptest! {
    #[test]
    fn registers_take_anything(
        accesses in proptest::collection::vec(
            (any::<bool>(), 0u64..0x1000, 0usize..9, any::<u64>()), 0..200)
    ) {
        let rig = started();
        for (write, offset, width, value) in accesses {
            let mut bytes = [0; 9];
            bytes[..8].copy_from_slice(&value.to_le_bytes());
            if write {
                rig.transport.write(offset, &bytes[..width]);
            } else {
                rig.transport.read(offset, &mut bytes[..width]);
            }
        }
        rig.settle();
        prop_assert_eq!(rig.event_loop.poll_once().unwrap(), 0);
    }
}

#[test]
fn counters_are_read_while_the_device_is_busy() {
    let rig = started();
    let mut counters = Vec::new();
    // The slot is locked while a device works.
    rig.transport
        .with(|_: &mut Rng| rig.transport.counters("rng", &mut counters))
        .unwrap();
    assert!(counters.contains(&("rng.activations".to_owned(), 1)));
    assert!(counters.contains(&("rng.bytes".to_owned(), 0)));
    rig.transport.remove();
    let mut counters = Vec::new();
    rig.transport.counters("rng", &mut counters);
    assert!(!counters.iter().any(|(name, _)| name == "rng.bytes"));
}

thread_local! {
    static LINES: Cell<u64> = const { Cell::new(0) };
}

/// Counts the records that virtio-queue writes, per thread.
struct CountLines;

impl log::Log for CountLines {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.target().starts_with("virtio_queue") {
            LINES.set(LINES.get() + 1);
        }
    }

    fn flush(&self) {}
}

#[test]
fn a_queue_outside_memory_leaves_no_line_in_the_log() {
    log::set_logger(&CountLines).unwrap();
    log::set_max_level(log::LevelFilter::Trace);
    let rig = started();
    // High halves of the addresses of the descriptor table, the available ring and the used ring.
    for high in [0x84, 0x94, 0xa4] {
        for _ in 0..100 {
            rig.set(STATUS, 0);
            rig.set(STATUS, 3);
            rig.set(0x24, 1);
            rig.set(0x20, 1);
            rig.set(STATUS, 11);
            rig.set(high, 1);
            rig.set(0x44, 1);
            rig.set(STATUS, 15);
            assert!(rig.needs_reset());
        }
    }
    assert_eq!(LINES.get(), 0);
}
