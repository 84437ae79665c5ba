//! I/O ports beside the serial port: power registers, the panic port and the ready port.

use std::sync::Arc;

use forkd_devices::bus::BusDevice;
use forkd_vmm_proto::StopCause;

use super::Notices;
use crate::arch::x86_64::layout;

const SLEEP_ENABLE: u8 = 1 << 5;
const PANICKED: u8 = 1;

/// Sleep control, sleep status and reset.
pub struct PowerRegisters(pub Arc<Notices>);

impl BusDevice for PowerRegisters {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let off = SLEEP_ENABLE | layout::SLEEP_TYPE_OFF << 2;
        match (offset, data) {
            (0, &[value]) if value & 0x3c == off & 0x3c => self.0.stop(StopCause::PowerOff),
            (2, &[layout::RESET_VALUE]) => self.0.stop(StopCause::Reset),
            _ => {}
        }
    }
}

/// The panic device.
pub struct PanicPort(pub Arc<Notices>);

impl BusDevice for PanicPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(PANICKED);
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        if matches!(data, [value] if value & PANICKED != 0) {
            self.0.panicked();
        }
    }
}

/// The ready port.
pub struct ReadyPort(pub Arc<Notices>);

impl BusDevice for ReadyPort {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u64, _data: &[u8]) {
        self.0.ready();
    }
}

#[cfg(test)]
mod tests {
    use super::super::Notice;
    use super::*;

    fn cause_of(offset: u64, value: u8) -> Option<StopCause> {
        let notices = Notices::new().unwrap();
        PowerRegisters(Arc::clone(&notices)).write(offset, &[value]);
        notices.take().into_iter().find_map(|n| match n {
            Notice::Stopped(cause) => Some(cause),
            _ => None,
        })
    }

    #[test]
    fn off_and_reset_are_told_apart() {
        assert_eq!(cause_of(0, 0x34), Some(StopCause::PowerOff));
        assert_eq!(cause_of(0, 0x14), None);
        assert_eq!(cause_of(0, 0x20), None);
        assert_eq!(cause_of(2, 1), Some(StopCause::Reset));
        assert_eq!(cause_of(2, 0), None);
        assert_eq!(cause_of(1, 0x34), None);
    }
}
