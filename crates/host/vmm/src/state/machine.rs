//! The parts of a state file: shape, VM, vCPUs, virtio slots, serial port.
//!
//! Each part has a version. A file is refused if a part is unknown, missing, doubled or has trailing bytes.

use forkd_devices::legacy::SerialSnapshot;
use forkd_devices::virtio::SlotState;
use forkd_vmm_proto::{DeviceSlot, MAX_VCPUS, Shape};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{Part, StateError, decode_parts, encode_parts};
use crate::arch::x86_64::layout;
use crate::kvm::{VcpuState, VmState};

const SHAPE: (u16, u16, &str) = (1, 2, "shape");
const VM: (u16, u16, &str) = (2, 1, "vm");
const VCPU: (u16, u16, &str) = (3, 1, "vcpu");
const SLOT: (u16, u16, &str) = (4, 2, "slot");
const SERIAL: (u16, u16, &str) = (5, 1, "serial");

/// The layout of addresses and interrupts that the state belongs to. A machine with another one cannot go
/// on with it.
const LAYOUT_VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct ShapePart {
    layout: u32,
    shape: Shape,
}

/// A virtio slot with a device in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotPart {
    pub slot: DeviceSlot,
    pub state: SlotState,
}

/// A machine without its memory and disks.
pub struct MachineState {
    /// The shape that the shell must have.
    pub shape: Shape,
    /// Clock and interrupt controllers.
    pub vm: VmState,
    /// The CPUs in order.
    pub vcpus: Vec<VcpuState>,
    /// The slots that have a device.
    pub slots: Vec<SlotPart>,
    /// The serial port.
    pub serial: SerialSnapshot,
}

impl MachineState {
    /// As a state file.
    pub fn encode(&self) -> Result<Vec<u8>, StateError> {
        let shape = ShapePart {
            layout: LAYOUT_VERSION,
            shape: self.shape,
        };
        let mut parts = vec![part(SHAPE, &shape)?, part(VM, &self.vm)?];
        for vcpu in &self.vcpus {
            parts.push(part(VCPU, vcpu)?);
        }
        for slot in &self.slots {
            parts.push(part(SLOT, slot)?);
        }
        parts.push(part(SERIAL, &self.serial)?);
        encode_parts(&parts)
    }

    /// From bytes that may be anything.
    pub fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        let parts = decode_parts(bytes)?;
        let known = [SHAPE, VM, VCPU, SLOT, SERIAL];
        if let Some(stranger) = parts
            .iter()
            .find(|p| !known.iter().any(|k| (k.0, k.1) == (p.kind, p.version)))
        {
            return Err(StateError::UnknownPart {
                kind: stranger.kind,
                version: stranger.version,
            });
        }
        let shape: ShapePart = one(&parts, SHAPE)?;
        if shape.layout != LAYOUT_VERSION {
            return Err(senseless(SHAPE, "another address layout"));
        }
        let shape = shape.shape;
        if shape.vcpus == 0 || shape.vcpus > MAX_VCPUS {
            return Err(senseless(SHAPE, "an impossible number of vCPUs"));
        }
        let vcpus: Vec<VcpuState> = all(&parts, VCPU)?;
        if vcpus.len() != usize::from(shape.vcpus) {
            return Err(StateError::PartCount {
                name: VCPU.2,
                count: vcpus.len(),
                expected: usize::from(shape.vcpus),
            });
        }
        let slots: Vec<SlotPart> = all(&parts, SLOT)?;
        check_slots(&slots)?;
        Ok(Self {
            shape,
            vm: one(&parts, VM)?,
            vcpus,
            slots,
            serial: one(&parts, SERIAL)?,
        })
    }
}

fn check_slots(slots: &[SlotPart]) -> Result<(), StateError> {
    for (n, slot) in slots.iter().enumerate() {
        if !layout::SLOTS.contains(&slot.slot) {
            return Err(senseless(SLOT, "a slot that does not exist"));
        }
        if slots
            .iter()
            .skip(n + 1)
            .any(|other| other.slot == slot.slot)
        {
            return Err(senseless(SLOT, "a slot that is there twice"));
        }
    }
    Ok(())
}

fn senseless(kind: (u16, u16, &'static str), reason: &'static str) -> StateError {
    StateError::Senseless {
        name: kind.2,
        reason,
    }
}

fn part<T: Serialize>(
    (kind, version, name): (u16, u16, &'static str),
    value: &T,
) -> Result<Part, StateError> {
    let payload = postcard::to_stdvec(value).map_err(|source| StateError::Part { name, source })?;
    Ok(Part {
        kind,
        version,
        payload,
    })
}

fn all<T: DeserializeOwned>(
    parts: &[Part],
    (kind, _, name): (u16, u16, &'static str),
) -> Result<Vec<T>, StateError> {
    parts
        .iter()
        .filter(|part| part.kind == kind)
        .map(|part| {
            let (value, rest) = postcard::take_from_bytes(&part.payload)
                .map_err(|source| StateError::Part { name, source })?;
            if rest.is_empty() {
                Ok(value)
            } else {
                Err(StateError::Trailing {
                    name,
                    left: rest.len(),
                })
            }
        })
        .collect()
}

fn one<T: DeserializeOwned>(
    parts: &[Part],
    kind: (u16, u16, &'static str),
) -> Result<T, StateError> {
    let mut found: Vec<T> = all(parts, kind)?;
    match (found.len(), found.pop()) {
        (1, Some(value)) => Ok(value),
        (count, _) => Err(StateError::PartCount {
            name: kind.2,
            count,
            expected: 1,
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::Arc;

    use forkd_devices::legacy::Serial;
    use forkd_devices::virtio::{MmioTransport, rng::Rng};
    use forkd_devices::{DeviceEvents, EventLoop};
    use forkd_memory::{GuestRam, RamLayout};
    use forkd_types::{Engine, MiB};
    use forkd_vmm_proto::{CpuModel, RateLimit};
    use kvm_bindings::{kvm_cpuid_entry2, kvm_msr_entry};
    use proptest::prelude::*;

    use super::*;

    struct Deaf;

    impl DeviceEvents for Deaf {
        fn agent_ready(&self) {}
        fn vsock_connect(&self, _port: u32, _stream: OwnedFd) {}
        fn device_failed(&self, _slot: DeviceSlot, _reason: &str) {}
    }

    fn sample() -> MachineState {
        let mut event_loop = EventLoop::new().unwrap();
        let serial = event_loop.add(Serial::new).unwrap();
        let slot = event_loop
            .add(|r| MmioTransport::new(DeviceSlot::Rng, r, Arc::new(Deaf)))
            .unwrap();
        let ram = GuestRam::reserve(RamLayout::new(64).unwrap()).unwrap();
        ram.map_zero().unwrap();
        let rng = Rng::new(RateLimit::default()).unwrap();
        slot.insert(Box::new(rng), ram.memory().clone()).unwrap();
        let vcpu = VcpuState {
            cpuid: vec![kvm_cpuid_entry2::default(); 3],
            regs: Default::default(),
            sregs: Default::default(),
            xsave: vec![7; 1024],
            xcrs: Some(Default::default()),
            debugregs: Default::default(),
            events: Default::default(),
            mp_state: Default::default(),
            lapic: Default::default(),
            msrs: vec![kvm_msr_entry::default(); 5],
            tsc_khz: Some(2_400_000),
        };
        MachineState {
            shape: Shape {
                engine: Engine::FORKD,
                memory: MiB(64),
                vcpus: 2,
                cpu: CpuModel::Baseline,
            },
            vm: VmState {
                clock_ns: 1,
                pic_master: Default::default(),
                pic_slave: Default::default(),
                ioapic: Default::default(),
            },
            vcpus: vec![vcpu.clone(), vcpu],
            slots: vec![SlotPart {
                slot: DeviceSlot::Rng,
                state: slot.save().unwrap(),
            }],
            serial: serial.save(),
        }
    }

    /// Makes the checksum right again, as one who means harm would.
    fn reseal(bytes: &mut [u8]) {
        let Some(body) = bytes.len().checked_sub(4) else {
            return;
        };
        let sum = crc32fast::hash(&bytes[..body]);
        bytes[body..].copy_from_slice(&sum.to_le_bytes());
    }

    #[test]
    fn a_machine_survives_its_file() {
        let state = sample();
        let bytes = state.encode().unwrap();
        let again = MachineState::decode(&bytes).unwrap();
        assert_eq!(again.shape, state.shape);
        assert_eq!(again.slots, state.slots);
        assert_eq!(again.encode().unwrap(), bytes);
    }

    #[test]
    fn missing_doubled_and_strange_parts_are_refused() {
        let parts = decode_parts(&sample().encode().unwrap()).unwrap();
        for n in 0..parts.len() {
            let mut fewer = parts.clone();
            let gone = fewer.remove(n);
            // A machine may have no devices; that the request must agree is checked later.
            let optional = gone.kind == SLOT.0;
            let result = MachineState::decode(&encode_parts(&fewer).unwrap());
            assert_eq!(result.is_ok(), optional, "without part {n}");
            let mut more = parts.clone();
            more.push(gone);
            assert!(MachineState::decode(&encode_parts(&more).unwrap()).is_err());
        }
        let mut strange = parts.clone();
        strange.push(Part {
            kind: 99,
            version: 1,
            payload: vec![],
        });
        assert!(matches!(
            MachineState::decode(&encode_parts(&strange).unwrap()),
            Err(StateError::UnknownPart { kind: 99, .. })
        ));
        let mut longer = parts;
        longer[1].payload.push(0);
        assert!(matches!(
            MachineState::decode(&encode_parts(&longer).unwrap()),
            Err(StateError::Trailing { .. })
        ));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn a_mutated_file_is_refused_and_never_panics(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..8),
            cut in proptest::option::of(any::<prop::sample::Index>()),
        ) {
            let good = sample().encode().unwrap();
            let mut bytes = good.clone();
            for (at, by) in changes {
                let at = at.index(bytes.len());
                bytes[at] ^= by;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            prop_assume!(bytes != good);
            prop_assert!(MachineState::decode(&bytes).is_err());
            reseal(&mut bytes);
            let _ = MachineState::decode(&bytes);
        }
    }
}
