//! The entropy device: fills buffers of the guest from the host's `getrandom`, under a rate limit.

use std::io;
use std::sync::Arc;

use forkd_vmm_proto::RateLimit;

use super::{RngMetrics, RngState};
use crate::Ready;
use crate::metrics::Counters;
use crate::rate::RateLimiter;
use crate::virtio::{
    Activation, DeviceError, DeviceState, FIRST_DEVICE_TOKEN, RestoreError, VirtioDevice,
    add_timer, feature,
};

const TYPE: u32 = 4;
const TIMER: u32 = FIRST_DEVICE_TOKEN;

/// The entropy device: fills buffers from the host's generator.
#[derive(Debug)]
pub struct Rng {
    pub(super) active: Option<Activation>,
    pub(super) limiter: RateLimiter,
    pub(super) metrics: Arc<RngMetrics>,
}

impl Rng {
    /// One that gives out bytes at most at the given rate.
    pub fn new(rate: RateLimit) -> io::Result<Self> {
        Ok(Self {
            active: None,
            limiter: RateLimiter::new(rate)?,
            metrics: Arc::default(),
        })
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u32 {
        TYPE
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[64]
    }

    fn features(&self) -> u64 {
        feature::COMMON
    }

    fn read_config(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        add_timer(&activation.events, self.limiter.timer(), TIMER)?;
        self.active = Some(activation);
        Ok(())
    }

    fn activation(&self) -> Option<&Activation> {
        self.active.as_ref()
    }

    fn reset(&mut self) {
        if let (Some(active), Some(timer)) = (self.active.take(), self.limiter.timer()) {
            active.events.remove(timer);
        }
    }

    fn on_queue(&mut self, _queue: usize) -> Result<(), DeviceError> {
        self.fill_buffers()
    }

    fn on_event(&mut self, token: u32, _ready: Ready) -> Result<(), DeviceError> {
        if token == TIMER {
            self.timer_fired()?;
        }
        Ok(())
    }

    fn save(&self) -> DeviceState {
        DeviceState::Rng(RngState::V1 {
            rate: self.limiter.save(),
        })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Rng(RngState::V1 { rate }) = state else {
            return Err(RestoreError::Device("it is not that of an entropy device"));
        };
        self.limiter.restore(rate);
        Ok(())
    }

    fn counters(&self) -> Arc<dyn Counters> {
        Arc::clone(&self.metrics) as _
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Descriptor, Rig};
    use forkd_vmm_proto::DeviceSlot;

    fn rig() -> Rig {
        let mut rig = Rig::new(DeviceSlot::Rng);
        rig.start(Box::new(Rng::new(RateLimit::default()).unwrap()));
        assert_eq!(rig.status(), 15);
        rig
    }

    #[test]
    fn buffers_are_filled_with_different_bytes() {
        let mut rig = rig();
        let (first, rooms) = rig.add(0, &[], &[64, 64]);
        let (second, _) = rig.add(0, &[], &[32]);
        rig.kick(0);
        assert_eq!(rig.used(0), Some((u32::from(first), 128)));
        assert_eq!(rig.used(0), Some((u32::from(second), 32)));
        assert_eq!(rig.used(0), None);
        assert_ne!(rig.read(rooms[0], 64), rig.read(rooms[1], 64));
        assert_ne!(rig.read(rooms[0], 64), vec![0; 64]);
        assert_eq!(rig.get(0x60), 1);
        assert!(rig.transport.interrupt().line().take());
        rig.set(0x64, 1);
        assert_eq!(rig.get(0x60), 0);
    }

    #[test]
    fn a_broken_chain_makes_it_stand_still_until_reset() {
        let mut rig = rig();
        let looped = Descriptor {
            addr: 0x5_0000,
            len: 16,
            flags: 1 | 2,
            next: 0,
        };
        rig.describe(0, 0, looped);
        rig.offer(0, 0);
        rig.kick(0);
        assert!(rig.needs_reset());
        assert_eq!(rig.counter("failures"), 1);
        assert_eq!(rig.events.get().failures.len(), 1);
        assert_eq!(rig.get(0x60) & 2, 2);
        rig.add(0, &[], &[64]);
        rig.kick(0);
        assert_eq!(rig.used(0), None);

        rig.bring_up(u64::MAX, 1);
        assert_eq!(rig.status(), 15);
        rig.add(0, &[], &[64]);
        rig.kick(0);
        assert!(rig.used(0).is_some());
    }

    #[test]
    fn an_index_that_jumps_is_a_failure() {
        let mut rig = rig();
        rig.set_avail_index(0, 5000);
        rig.kick(0);
        assert!(rig.needs_reset());
    }

    #[test]
    fn the_rate_holds_requests_back() {
        let mut rig = Rig::new(DeviceSlot::Rng);
        let rate = RateLimit {
            bytes_per_second: 1,
            burst_bytes: 64,
            ..RateLimit::default()
        };
        rig.start(Box::new(Rng::new(rate).unwrap()));
        for _ in 0..3 {
            rig.add(0, &[], &[64]);
        }
        rig.kick(0);
        assert!(rig.used(0).is_some());
        assert!(rig.used(0).is_none());
        assert_eq!(rig.counter("throttled"), 1);
    }

    #[test]
    fn a_restored_device_goes_on_where_it_was() {
        let mut rig = rig();
        rig.add(0, &[], &[8]);
        rig.kick(0);
        assert!(rig.used(0).is_some());
        rig.add(0, &[], &[16]);
        let mut child = rig
            .restore_into(Box::new(Rng::new(RateLimit::default()).unwrap()))
            .unwrap();
        child.settle();
        assert_eq!(child.used(0).map(|(_, len)| len), Some(16));
        assert_eq!(child.used(0), None);
    }
}
