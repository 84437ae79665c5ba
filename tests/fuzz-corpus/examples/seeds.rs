//! Writes the seed inputs below `fuzz/corpus`.
//!
//! A seed is small and reaches the code behind the first checks of its target, which a fuzzer would take long
//! to find.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use forkd_devices::legacy::Serial;
use forkd_devices::testing::Rig;
use forkd_devices::virtio::VirtioDevice;
use forkd_devices::virtio::balloon::Balloon;
use forkd_devices::virtio::rng::Rng;
use forkd_devices::{EventLoop, MemoryReclaim};
use forkd_guest_proto::{Kind, frame};
use forkd_types::{Engine, MiB};
use forkd_vmm::kvm::{VcpuState, VmState};
use forkd_vmm::state::{MachineState, SlotPart};
use forkd_vmm_proto::{
    Command, CpuModel, DeviceSlot, Event, FdIndex, FromVmm, PrepareSpec, RateLimit, Request, Shape,
    encode,
};

struct Nowhere;

impl MemoryReclaim for Nowhere {
    fn discard(&self, _addr: u64, _len: u64) -> std::io::Result<()> {
        Ok(())
    }
}

fn save(target: &str, name: &str, data: &[u8]) -> std::io::Result<()> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join(name), data)
}

/// A step of the driver: a chain with the given readable parts and writable buffers, then the doorbell.
fn chain(queue: u8, out: &[&[u8]], rooms: &[u16]) -> Vec<u8> {
    let shape = out.len() as u8 | (rooms.len() as u8) << 2;
    let mut step = vec![queue, 0, shape];
    for part in out {
        step.push(part.len() as u8);
        step.extend_from_slice(part);
    }
    for room in rooms {
        step.extend(room.to_le_bytes());
    }
    step
}

fn block_request(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn block() -> Vec<u8> {
    let range = [&8u64.to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
    [
        vec![0],
        chain(0, &[&block_request(1, 3), &[7; 255], &[7; 255]], &[1]),
        chain(0, &[&block_request(1, 3), &[7; 200]], &[1]),
        chain(0, &[&block_request(0, 3)], &[512, 1]),
        chain(0, &[&block_request(8, 0)], &[20, 1]),
        chain(0, &[&block_request(11, 0), &range], &[1]),
        chain(0, &[&block_request(13, 0), &range], &[1]),
        chain(0, &[&block_request(4, 0)], &[1]),
        vec![0, 10],
        chain(0, &[&block_request(0, 0)], &[4096, 1]),
    ]
    .concat()
}

fn net() -> Vec<u8> {
    [
        vec![0],
        chain(0, &[], &[2048]),
        chain(0, &[], &[1000]),
        chain(0, &[], &[1000]),
        [&[0, 9][..], &[2, 9, 0xe8, 0x05, 0, 0, 0, 0], &[0; 8]].concat(),
        chain(1, &[&[0; 12], &[3; 200]], &[]),
        [&[0, 9][..], &[1], &[0; 15]].concat(),
        vec![0, 10],
        chain(1, &[&[0; 12], &[4; 60]], &[]),
    ]
    .concat()
}

fn vsock_header(op: u16, host: u32, guest: u32, len: u32) -> Vec<u8> {
    let mut header = Vec::new();
    header.extend(3u64.to_le_bytes());
    header.extend(2u64.to_le_bytes());
    header.extend(guest.to_le_bytes());
    header.extend(host.to_le_bytes());
    header.extend(len.to_le_bytes());
    header.extend(1u16.to_le_bytes());
    header.extend(op.to_le_bytes());
    header.extend(0u32.to_le_bytes());
    header.extend(65536u32.to_le_bytes());
    header.extend(0u32.to_le_bytes());
    header
}

fn vsock() -> Vec<u8> {
    let first = 1 << 30;
    let client = |which: u8, action: u8, rest: u8| {
        let mut step = vec![0, 9, which, action, rest];
        step.resize(18, 0);
        step
    };
    [
        vec![0],
        chain(0, &[], &[4096]),
        chain(0, &[], &[4096]),
        chain(0, &[], &[4096]),
        client(0, 4, 2),
        chain(1, &[&vsock_header(2, first, 2, 0)], &[]),
        client(0, 4, 200),
        chain(1, &[&vsock_header(5, first, 2, 5), b"hello"], &[]),
        chain(1, &[&vsock_header(1, 1, 9, 0)], &[]),
        chain(1, &[&vsock_header(1, 77, 9, 0)], &[]),
        vec![0, 10],
        client(0, 1, 0),
        chain(1, &[&vsock_header(4, first, 2, 0)], &[]),
    ]
    .concat()
}

fn vsock_packets() -> Vec<u8> {
    let packet = |op: u8, host: u8, guest: u8, len: u16| {
        let mut step = vec![3, 6, op, host, guest];
        step.extend(len.to_le_bytes());
        step.push(0);
        step.extend(0x4000u16.to_le_bytes());
        step.extend([0; 4]);
        step
    };
    [
        vec![0, 0, 4, 2],
        packet(2, 0, 2, 0),
        packet(5, 0, 2, 1000),
        vec![0, 0, 4, 0x88, 0x13],
        packet(6, 0, 2, 0),
        vec![2],
        packet(4, 0, 2, 0),
    ]
    .concat()
}

fn balloon() -> Vec<u8> {
    let pages: Vec<u8> = [100u32, 101, 300]
        .iter()
        .flat_map(|p| p.to_le_bytes())
        .collect();
    let stat = [&4u16.to_le_bytes()[..], &1000u64.to_le_bytes()].concat();
    [
        vec![0],
        chain(0, &[&pages], &[]),
        chain(1, &[&pages], &[]),
        chain(2, &[&stat], &[]),
        chain(4, &[], &[4096]),
        [&[0, 9, 1][..], &[0; 15]].concat(),
        vec![0, 10],
    ]
    .concat()
}

/// A ring of 64 with one chain of two descriptors, the second through an indirect table.
fn virtqueue() -> Vec<u8> {
    let descriptor = |addr: u64, len: u32, flags: u16, next: u16| {
        [
            &addr.to_le_bytes()[..],
            &len.to_le_bytes(),
            &flags.to_le_bytes(),
            &next.to_le_bytes(),
        ]
        .concat()
    };
    let mut data = descriptor(0x5_0000, 64, 3, 1);
    data.extend(descriptor(0x4000, 32, 4, 0));
    data.resize(16 * 64, 0);
    data.extend([0, 0, 1, 0, 0, 0]);
    data.resize(16 * 64 + 6 + 128, 0);
    data.extend(descriptor(0x6_0000, 16, 3, 1));
    data.extend(descriptor(0x7_0000, 16, 2, 0));
    data
}

fn slot_state(slot: DeviceSlot, device: Box<dyn VirtioDevice>) -> Vec<u8> {
    let mut rig = Rig::new(slot);
    rig.start(device);
    rig.add(0, &[], &[64]);
    rig.kick(0);
    let state = rig.transport.save().expect("there is a device");
    postcard::to_stdvec(&state).expect("state is plain data")
}

fn registers() -> Vec<u8> {
    let mut data = vec![2];
    for status in [1u64, 3, 11, 15] {
        data.push(1 | 2 << 2);
        data.extend(status.to_le_bytes());
    }
    data
}

fn main() -> std::io::Result<()> {
    save("block", "requests", &block())?;
    save("net", "frames", &net())?;
    save("vsock", "connections", &vsock())?;
    save("vsock_packets", "connections", &vsock_packets())?;
    save("balloon", "pages", &balloon())?;
    let entropy = [vec![0], chain(0, &[], &[64, 64]), vec![0, 10]].concat();
    save("rng", "entropy", &entropy)?;
    save("virtqueue", "indirect", &virtqueue())?;
    save("mmio_registers", "bring-up", &registers())?;
    save(
        "serial",
        "print",
        &[0, 0, 0, 0, 4, b'h', 4, b'i', 2, 0, 3, 0],
    )?;
    save(
        "disk_layer",
        "work",
        &[2, 0, 3, 9, 2, 4, 4, 3, 0, 30, 4, 0, 0, 1, 9, 9, 5, 0, 0],
    )?;
    save("disk_layer", "damaged", &[1, 1, 0, 0x10, 1, 0, 3, 9])?;

    let rng = Box::new(Rng::new(RateLimit::default())?);
    save("slot_state", "rng", &slot_state(DeviceSlot::Rng, rng))?;
    let balloon = Box::new(Balloon::new(Arc::new(Nowhere)));
    save(
        "slot_state",
        "balloon",
        &slot_state(DeviceSlot::Balloon, balloon),
    )?;

    let hello = Request {
        seq: 1,
        command: Command::Hello { version: 1 },
    };
    let prepare = Request {
        seq: 2,
        command: Command::Prepare(PrepareSpec {
            shape: shape(2),
            kvm: FdIndex(0),
            pagemap: Some(FdIndex(1)),
            jail: None,
        }),
    };
    save("vmm_proto", "hello", &encoded(&hello))?;
    save("vmm_proto", "prepare", &encoded(&prepare))?;
    save(
        "vmm_proto",
        "event",
        &encoded(&FromVmm::Event(Event::AgentReady)),
    )?;

    let mut stream = vec![3];
    frame::encode_into(
        &mut stream,
        0,
        Kind::Hello,
        0,
        br#"{"version":1,"features":[]}"#,
    );
    frame::encode_into(&mut stream, 7, Kind::Request, 0, br#"{"op":"ping"}"#);
    frame::encode_into(&mut stream, 7, Kind::Data, 1, b"bytes");
    save("guest_proto", "ping", &stream)?;

    for (name, frames) in agent_answers() {
        let mut stream = Vec::new();
        for (number, kind, channel, payload) in frames {
            frame::encode_into(&mut stream, number, kind, channel, payload);
        }
        save("agent_client", name, &stream)?;
    }

    save("vmm_state", "machine", &machine_state()?)?;
    save("boot", "elf", b"\x00\x7fELF\x02\x01\x01\x00")?;
    Ok(())
}

type Answer = (u32, Kind, u8, &'static [u8]);

/// Answers to the calls of the target `agent_client`.
fn agent_answers() -> [(&'static str, Vec<Answer>); 3] {
    let exec = vec![
        (1, Kind::Response, 0, &br#"{"ok":{"version":"1"}}"#[..]),
        (
            2,
            Kind::Event,
            0,
            br#"{"event":"started","process":1,"pid":7}"#,
        ),
        (2, Kind::Data, 1, b"out"),
        (2, Kind::Data, 2, b"err"),
        (2, Kind::End, 1, b""),
        (2, Kind::End, 2, b""),
        (2, Kind::Response, 0, br#"{"ok":{"status":{"code":0}}}"#),
    ];
    let eval = vec![
        (
            3,
            Kind::Data,
            3,
            &br#"{"json":[[0],[0]],"display":{"a":1}}"#[..],
        ),
        (3, Kind::End, 3, b""),
        (3, Kind::Response, 0, br#"{"ok":{"bulk":36}}"#),
    ];
    let files = vec![
        (
            4,
            Kind::Event,
            0,
            &br#"{"event":"entries","entries":[{"path":"x","kind":"file","size":0,"mode":0}]}"#[..],
        ),
        (4, Kind::Response, 0, br#"{"ok":{"truncated":false}}"#),
        (
            5,
            Kind::Event,
            0,
            br#"{"event":"file","kind":"file","size":3,"mode":0}"#,
        ),
        (5, Kind::Data, 3, b"abc"),
        (5, Kind::End, 3, b""),
        (5, Kind::Response, 0, br#"{"ok":{"bytes":3}}"#),
        (6, Kind::Event, 0, br#"{"event":"watching"}"#),
        (7, Kind::Event, 0, br#"{"event":"connected"}"#),
        (7, Kind::Data, 1, b"hello"),
    ];
    [("exec", exec), ("eval", eval), ("files", files)]
}

/// A machine with one CPU and one device, all registers zero.
fn machine_state() -> std::io::Result<Vec<u8>> {
    let mut rig = Rig::new(DeviceSlot::Rng);
    rig.start(Box::new(Rng::new(RateLimit::default())?));
    let state = MachineState {
        shape: shape(1),
        vm: VmState {
            clock_ns: 1,
            pic_master: Default::default(),
            pic_slave: Default::default(),
            ioapic: Default::default(),
        },
        vcpus: vec![VcpuState {
            cpuid: vec![],
            regs: Default::default(),
            sregs: Default::default(),
            xsave: vec![0; 4],
            xcrs: None,
            debugregs: Default::default(),
            events: Default::default(),
            mp_state: Default::default(),
            lapic: Default::default(),
            msrs: vec![],
            tsc_khz: None,
        }],
        slots: vec![SlotPart {
            slot: DeviceSlot::Rng,
            state: rig.transport.save().expect("there is a device"),
        }],
        serial: EventLoop::new()?.add(Serial::new)?.save(),
    };
    Ok(state.encode().expect("state is plain data"))
}

fn shape(vcpus: u8) -> Shape {
    Shape {
        engine: Engine::FORKD,
        memory: MiB(256),
        vcpus,
        cpu: CpuModel::Host,
    }
}

fn encoded<T: serde::Serialize>(message: &T) -> Vec<u8> {
    encode(message).expect("the message is small")
}
