//! The parts a machine is made of.

use forkd_devices::legacy::SerialSnapshot;
use forkd_devices::virtio::SlotState;
use forkd_vmm_proto::{DeviceSlot, MAX_VCPUS, Shape};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{Part, StateError, decode_parts, encode_parts};
use crate::arch::x86_64::layout;
use crate::kvm::{VcpuState, VmState};

const SHAPE: (u16, u16, &str) = (1, 1, "shape");
const VM: (u16, u16, &str) = (2, 1, "vm");
const VCPU: (u16, u16, &str) = (3, 1, "vcpu");
const SLOT: (u16, u16, &str) = (4, 1, "slot");
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
    /// Which slot.
    pub slot: DeviceSlot,
    /// Its state.
    pub state: SlotState,
}

/// A machine without its memory and disks.
pub struct MachineState {
    /// What the shell must look like.
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
