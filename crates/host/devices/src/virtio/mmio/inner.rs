//! The part of a slot behind its lock: registers, queues before activation, and the device.

use super::registers::status;
use crate::GuestMemory;
use crate::log::LogLimit;
use crate::virtio::{QueueSnapshot, VirtioDevice, feature};

/// Registers and device of a slot.
pub(super) struct Inner {
    pub(super) device: Option<Box<dyn VirtioDevice>>,
    pub(super) memory: Option<GuestMemory>,
    pub(super) status: u32,
    pub(super) device_features_sel: u32,
    pub(super) driver_features_sel: u32,
    pub(super) driver_features: u64,
    pub(super) queue_sel: u32,
    pub(super) queues: Vec<QueueSnapshot>,
    pub(super) log: LogLimit,
}

impl Inner {
    pub(super) fn empty() -> Self {
        Self {
            device: None,
            memory: None,
            status: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            driver_features: 0,
            queue_sel: 0,
            queues: Vec::new(),
            log: LogLimit::new(),
        }
    }

    pub(super) fn put(&mut self, device: Box<dyn VirtioDevice>, memory: GuestMemory) {
        self.device = Some(device);
        self.memory = Some(memory);
        self.reset();
    }

    pub(super) fn reset(&mut self) {
        self.status = 0;
        self.device_features_sel = 0;
        self.driver_features_sel = 0;
        self.driver_features = 0;
        self.queue_sel = 0;
        let Some(device) = self.device.as_deref_mut() else {
            return;
        };
        device.reset();
        self.queues = device
            .queue_sizes()
            .iter()
            .map(|&size| QueueSnapshot::unused(size))
            .collect();
    }

    pub(super) fn selected(&mut self) -> Option<&mut QueueSnapshot> {
        let index = usize::try_from(self.queue_sel).ok()?;
        self.queues.get_mut(index)
    }

    pub(super) fn write_features(&mut self, value: u32) {
        // Negotiation is over once the device has agreed.
        if self.status & status::FEATURES_OK != 0 {
            return;
        }
        match self.driver_features_sel {
            0 => set_low(&mut self.driver_features, value),
            1 => set_high(&mut self.driver_features, value),
            _ => {}
        }
    }

    pub(super) fn features_fit(&self) -> bool {
        let offered = self.device.as_deref().map_or(0, VirtioDevice::features);
        self.driver_features & !offered == 0 && self.driver_features & feature::VERSION_1 != 0
    }
}

pub(super) fn half(value: u64, selector: u32) -> u32 {
    match selector {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

pub(super) fn set_low(target: &mut u64, value: u32) {
    *target = *target & !u64::from(u32::MAX) | u64::from(value);
}

pub(super) fn set_high(target: &mut u64, value: u32) {
    *target = *target & u64::from(u32::MAX) | u64::from(value) << 32;
}
