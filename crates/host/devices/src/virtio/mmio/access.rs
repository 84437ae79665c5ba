//! Register accesses from vCPU threads.

use super::inner::half;
use super::registers as reg;
use super::transport::MmioTransport;
use crate::bus::BusDevice;

impl MmioTransport {
    fn read_register(&self, offset: u64) -> u32 {
        // These are read on every interrupt and must not wait for a request in progress.
        match offset {
            reg::MAGIC_VALUE => return reg::MAGIC,
            reg::VERSION => return 2,
            reg::VENDOR_ID => return reg::VENDOR,
            reg::INTERRUPT_STATUS => return self.interrupt.status(),
            reg::CONFIG_GENERATION => return self.interrupt.generation(),
            reg::SHM_LEN_LOW..=reg::SHM_BASE_HIGH => return u32::MAX,
            _ => {}
        }
        let inner = self.lock();
        let Some(device) = inner.device.as_deref() else {
            return 0;
        };
        match offset {
            reg::DEVICE_ID => device.device_type(),
            reg::DEVICE_FEATURES => half(device.features(), inner.device_features_sel),
            reg::QUEUE_NUM_MAX => usize::try_from(inner.queue_sel)
                .ok()
                .and_then(|index| device.queue_sizes().get(index))
                .map_or(0, |&max| u32::from(max)),
            reg::QUEUE_READY => usize::try_from(inner.queue_sel)
                .ok()
                .and_then(|index| inner.queues.get(index))
                .map_or(0, |queue| u32::from(queue.ready)),
            reg::STATUS => inner.status,
            _ => {
                self.metrics.bad_accesses.inc();
                0
            }
        }
    }

    fn write_register(&self, offset: u64, value: u32) {
        match offset {
            reg::INTERRUPT_ACK => return self.interrupt.acknowledge(value),
            reg::QUEUE_NOTIFY => return self.ring(value),
            _ => {}
        }
        let mut inner = self.lock();
        if inner.device.is_none() {
            self.metrics.bad_accesses.inc();
            return;
        }
        match offset {
            reg::DEVICE_FEATURES_SEL => inner.device_features_sel = value,
            reg::DRIVER_FEATURES_SEL => inner.driver_features_sel = value,
            reg::DRIVER_FEATURES => inner.write_features(value),
            reg::QUEUE_SEL => inner.queue_sel = value,
            reg::STATUS => self.write_status(&mut inner, value),
            reg::QUEUE_NUM
            | reg::QUEUE_READY
            | reg::QUEUE_DESC_LOW
            | reg::QUEUE_DESC_HIGH
            | reg::QUEUE_DRIVER_LOW
            | reg::QUEUE_DRIVER_HIGH
            | reg::QUEUE_DEVICE_LOW
            | reg::QUEUE_DEVICE_HIGH => self.write_queue(&mut inner, offset, value),
            _ => self.metrics.bad_accesses.inc(),
        }
    }

    fn ring(&self, queue: u32) {
        match usize::try_from(queue)
            .ok()
            .and_then(|q| self.doorbells.get(q))
        {
            // An eventfd that is open can always be raised.
            Some(doorbell) => drop(doorbell.signal()),
            None => self.metrics.bad_accesses.inc(),
        }
    }
}

impl BusDevice for MmioTransport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(offset) = offset.checked_sub(reg::CONFIG) {
            match self.lock().device.as_deref() {
                Some(device) => device.read_config(offset, data),
                None => data.fill(0),
            }
            return;
        }
        match <&mut [u8; 4]>::try_from(&mut *data) {
            Ok(word) if offset.is_multiple_of(4) => {
                *word = self.read_register(offset).to_le_bytes()
            }
            _ => {
                self.metrics.bad_accesses.inc();
                data.fill(0);
            }
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some(offset) = offset.checked_sub(reg::CONFIG) {
            if let Some(device) = self.lock().device.as_deref_mut() {
                device.write_config(offset, data);
            }
            return;
        }
        match <[u8; 4]>::try_from(data) {
            Ok(word) if offset.is_multiple_of(4) => {
                self.write_register(offset, u32::from_le_bytes(word))
            }
            _ => self.metrics.bad_accesses.inc(),
        }
    }
}
