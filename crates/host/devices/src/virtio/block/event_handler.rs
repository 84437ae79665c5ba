//! A disk's work on the disk thread: takes requests from the queue under the rate limit.

use super::Block;
use super::request::{BOUNCE, Worker, weight};
use crate::virtio::{DeviceError, Verdict};

const QUEUE: usize = 0;
/// Bytes of the bounce buffer that are kept between two rings of the doorbell.
const KEEP: usize = BOUNCE / 4;

impl Block {
    pub(super) fn timer_fired(&mut self) -> Result<(), DeviceError> {
        self.limiter.on_timer();
        self.serve()
    }

    pub(super) fn serve(&mut self) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let (limiter, metrics) = (&mut self.limiter, &self.metrics);
        let events = active.events.clone();
        let mut worker = Worker {
            disk: self.disk.as_mut(),
            serial: &self.serial,
            bounce: &mut self.bounce,
            metrics,
            events: &events,
        };
        let result = active.drain(QUEUE, |memory, chain| {
            if !limiter.ready() {
                metrics.throttled.inc();
                return Ok(Verdict::Hold);
            }
            let verdict = worker.run(memory, chain)?;
            if verdict != Verdict::Again {
                limiter.charge(weight(memory, chain));
            }
            Ok(verdict)
        });
        self.bounce.truncate(KEEP);
        self.bounce.shrink_to(KEEP);
        self.measure();
        result
    }
}
