//! The keyboard controller, of which only the reset line is connected.

use std::sync::Mutex;

use vm_superio::{I8042Device, Trigger};

use crate::bus::BusDevice;

/// The first port.
pub const I8042_BASE: u64 = 0x60;
/// The number of ports.
pub const I8042_LEN: u64 = 5;

struct Reset(Box<dyn Fn() + Send + Sync>);

impl Trigger for Reset {
    type E = std::convert::Infallible;

    fn trigger(&self) -> Result<(), Self::E> {
        (self.0)();
        Ok(())
    }
}

/// The keyboard controller.
pub struct I8042(Mutex<I8042Device<Reset>>);

impl I8042 {
    /// One that calls `on_reset`, on the vCPU's thread, when the guest pulls the reset line.
    pub fn new(on_reset: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Mutex::new(I8042Device::new(Reset(Box::new(on_reset)))))
    }
}

impl BusDevice for I8042 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let ([value], Ok(offset), Ok(mut device)) = (data, u8::try_from(offset), self.0.lock()) {
            *value = device.read(offset);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (&[value], Ok(offset), Ok(mut device)) = (data, u8::try_from(offset), self.0.lock())
        {
            let Ok(()) = device.write(offset, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn only_the_reset_command_resets() {
        let count = Arc::new(AtomicU32::new(0));
        let seen = Arc::clone(&count);
        let device = I8042::new(move || {
            seen.fetch_add(1, Ordering::SeqCst);
        });
        device.write(0, &[0xfe]);
        device.write(4, &[0xd1]);
        device.write(4, &[0xfe, 0xfe]);
        assert_eq!(count.load(Ordering::SeqCst), 0);
        device.write(4, &[0xfe]);
        assert_eq!(count.load(Ordering::SeqCst), 1);
    }
}
