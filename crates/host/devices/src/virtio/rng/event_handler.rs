//! The entropy device's part on the device thread.

use super::Rng;
use crate::virtio::{DeviceError, Verdict};

const QUEUE: usize = 0;
/// The most bytes for one request; a driver asks again for more.
const MAX_REQUEST: usize = 64 * 1024;

impl Rng {
    pub(super) fn timer_fired(&mut self) -> Result<(), DeviceError> {
        self.limiter.on_timer();
        self.fill_buffers()
    }

    pub(super) fn fill_buffers(&mut self) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let (limiter, metrics) = (&mut self.limiter, &self.metrics);
        active.drain(QUEUE, |memory, chain| {
            if !limiter.ready() {
                metrics.throttled.inc();
                return Ok(Verdict::Hold);
            }
            let mut writer = chain.writer(memory);
            let mut entropy = vec![0; writer.left().min(MAX_REQUEST)];
            match rustix::rand::getrandom(&mut entropy, rustix::rand::GetRandomFlags::empty()) {
                // An interrupted call gives fewer bytes; a driver takes what it gets.
                Ok(count) => writer.write(entropy.get(..count).unwrap_or_default())?,
                Err(_) => metrics.errors.inc(),
            }
            let written = writer.written();
            limiter.charge(u64::from(written));
            metrics.requests.inc();
            metrics.bytes.add(u64::from(written));
            Ok(Verdict::Used(written))
        })
    }
}
