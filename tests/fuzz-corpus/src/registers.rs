//! Fuzz targets for device registers, read and written in any order and width.

use forkd_devices::EventTarget;
use forkd_devices::bus::BusDevice;
use forkd_devices::legacy::{Console, Serial};
use forkd_devices::testing::Rig;
use forkd_devices::{EventLoop, Ready};
use forkd_vmm_proto::DeviceSlot;

use crate::devices::{device_of_type, memory_file};
use crate::input::Input;

const MAX_STEPS: usize = 256;

/// The registers of the transport and the configuration space of each device.
pub(crate) fn mmio(data: &[u8]) {
    let mut input = Input::new(data);
    let (slot, kind) = [
        (DeviceSlot::Net, 1),
        (DeviceSlot::Disk(0), 2),
        (DeviceSlot::Rng, 4),
        (DeviceSlot::Balloon, 5),
        (DeviceSlot::Vsock, 19),
        (DeviceSlot::Rng, 0),
    ][usize::from(input.u8()) % 6];
    let rig = Rig::new(slot);
    if let Some(device) = device_of_type(kind, &rig) {
        let inserted = rig.transport.insert(device, rig.memory.clone());
        assert!(inserted.is_ok(), "the slot was empty");
    }
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let action = input.u8();
        let offset = match action & 3 {
            // Existing registers more often than the rest of the window.
            0 => u64::from(input.u16() % 0x1000),
            1 => 0x70,
            _ => u64::from(input.u8() % 0x44) * 4,
        };
        let width = [1, 2, 4, 4, 4, 8, 4, 3][usize::from(action >> 2 & 7)];
        let mut bytes = input.u64().to_le_bytes();
        if action & 0x20 == 0 {
            rig.transport.write(offset, &bytes[..width]);
        } else {
            rig.transport.read(offset, &mut bytes[..width]);
        }
    }
    rig.settle();
    let events = rig.event_loop.poll_once();
    assert!(matches!(events, Ok(0)), "the device spins: {events:?}");
}

/// The serial port.
pub(crate) fn serial(data: &[u8]) {
    let mut input = Input::new(data);
    let mut event_loop = EventLoop::new().expect("descriptors are not short");
    let serial = event_loop
        .add(Serial::new)
        .expect("descriptors are not short");
    let console = Console {
        output: memory_file().into(),
        bytes_per_second: u64::from(input.u16()),
        max_bytes: u64::from(input.u16()),
    };
    serial.attach(console).expect("a file is a console");
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let action = input.u8();
        let mut value = [input.u8()];
        let offset = u64::from(action >> 3 & 7);
        match action & 7 {
            0 => serial.read(offset, &mut value),
            1 => drop(serial.feed(input.bytes(usize::from(value[0])))),
            2 => serial.on_event(u32::from(value[0] & 1), Ready::IN),
            3 => {
                let saved = serial.save();
                serial.restore(saved).expect("what was saved is good");
            }
            _ => serial.write(offset, &value),
        }
    }
    serial.flush();
}
