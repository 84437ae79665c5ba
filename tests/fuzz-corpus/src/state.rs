//! Fuzz targets for saved state, which is untrusted when it is read back.
//!
//! A device rejects the state or goes on with it. The state that it saves afterwards must be valid.

use forkd_devices::testing::Rig;
use forkd_devices::virtio::SlotState;
use forkd_memory::WorkingSet;
use forkd_vmm::state::{MachineState, decode_parts};
use forkd_vmm_proto::DeviceSlot;

use crate::devices::device_of_type;

/// The state of one device slot.
pub(crate) fn slot(data: &[u8]) {
    let Ok(state) = postcard::from_bytes::<SlotState>(data) else {
        return;
    };
    let SlotState::V1(inner) = &state;
    let kind = inner.device_type;
    let slot = match kind {
        1 => DeviceSlot::Net,
        2 => DeviceSlot::Disk(0),
        5 => DeviceSlot::Balloon,
        19 => DeviceSlot::Vsock,
        _ => DeviceSlot::Rng,
    };
    let rig = Rig::new(slot);
    let (Some(device), Some(next)) = (device_of_type(kind, &rig), device_of_type(kind, &rig))
    else {
        return;
    };
    let Ok(rig) = rig.restore_state_into(device, state) else {
        return;
    };
    rig.settle();
    let events = rig.event_loop.poll_once();
    assert!(matches!(events, Ok(0)), "the device spins: {events:?}");
    if let Err(error) = rig.restore_into(next) {
        panic!("state that was just saved is refused: {error:?}");
    }
}

/// The state of a whole VM, and its list of touched pages.
pub(crate) fn machine(data: &[u8]) {
    look_at(data);
    // A second run with correct length and checksum, which a fuzzer does not guess.
    let Some(body) = data.len().checked_sub(4).filter(|len| *len >= 24) else {
        return;
    };
    let mut bytes = data.to_vec();
    bytes[16..24].copy_from_slice(&(data.len() as u64).to_le_bytes());
    let sum = crc32fast::hash(&bytes[..body]);
    bytes[body..].copy_from_slice(&sum.to_le_bytes());
    look_at(&bytes);
}

fn look_at(data: &[u8]) {
    let _ = decode_parts(data);
    if let Ok(state) = MachineState::decode(data) {
        let bytes = state.encode().expect("what was decoded encodes");
        assert!(MachineState::decode(&bytes).is_ok());
    }
    let _ = WorkingSet::decode(data, 1 << 14);
}
