//! The balloon device: its target size, memory statistics, and free-page reporting.
//!
//! Pages that the guest gives up are returned to the host through [`MemoryReclaim`] and read as zero, or as the
//! image, afterwards.

use std::sync::Arc;

use virtio_queue::QueueT;

use super::event_handler::{DEFLATE, INFLATE, PAGE, STATS};
use super::{BalloonMetrics, BalloonState};
use crate::MemoryReclaim;
use crate::metrics::Counters;
use crate::virtio::{
    Activation, DeviceError, DeviceState, RestoreError, VirtioDevice, feature, read_config_bytes,
};

const TYPE: u32 = 5;
const F_STATS: u64 = 1 << 1;
const F_DEFLATE_ON_OOM: u64 = 1 << 2;
const F_REPORTING: u64 = 1 << 5;
/// Where the driver writes the size of the balloon.
const ACTUAL: u64 = 4;
const PAGES_PER_MIB: u32 = 256;

pub struct Balloon {
    pub(super) active: Option<Activation>,
    target: u32,
    actual: u32,
    /// The queue that free pages are reported on. Drivers do not agree on its number, which depends on
    /// how they count the ones they do not use; it is the last one they set up.
    reporting: Option<usize>,
    pub(super) reclaim: Arc<dyn MemoryReclaim>,
    pub(super) metrics: Arc<BalloonMetrics>,
}

impl Balloon {
    /// A balloon without air that gives pages to `reclaim`.
    pub fn new(reclaim: Arc<dyn MemoryReclaim>) -> Self {
        Self {
            active: None,
            target: 0,
            actual: 0,
            reporting: None,
            reclaim,
            metrics: Arc::default(),
        }
    }

    /// Asks the guest to make the balloon this large.
    pub fn set_target(&mut self, mib: u32) {
        self.target = mib.saturating_mul(PAGES_PER_MIB);
        self.metrics.target_bytes.set(u64::from(self.target) * PAGE);
        if let Some(active) = &self.active {
            active.interrupt.config_change();
        }
    }

    /// Asks the guest for new statistics; they are in the counters a moment later.
    pub fn ask_for_stats(&mut self) -> Result<(), DeviceError> {
        if self.active.as_ref().is_some_and(|a| a.has(F_STATS)) {
            self.return_stats()?;
        }
        Ok(())
    }

    fn set_actual(&mut self, pages: u32) {
        self.actual = pages;
        self.metrics.actual_bytes.set(u64::from(pages) * PAGE);
    }
}

impl VirtioDevice for Balloon {
    fn device_type(&self) -> u32 {
        TYPE
    }

    fn queue_sizes(&self) -> &'static [u16] {
        &[128, 128, 64, 64, 64]
    }

    fn features(&self) -> u64 {
        feature::COMMON | F_STATS | F_DEFLATE_ON_OOM | F_REPORTING
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 16];
        config[..4].copy_from_slice(&self.target.to_le_bytes());
        config[4..8].copy_from_slice(&self.actual.to_le_bytes());
        read_config_bytes(&config, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        if let (ACTUAL, Ok(pages)) = (offset, <[u8; 4]>::try_from(data)) {
            self.set_actual(u32::from_le_bytes(pages));
        }
    }

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let first = if activation.has(F_STATS) {
            STATS + 1
        } else {
            STATS
        };
        self.reporting = activation
            .queues
            .iter()
            .enumerate()
            .skip(first)
            .filter(|(_, queue)| queue.ready() && activation.has(F_REPORTING))
            .map(|(index, _)| index)
            .next_back();
        self.active = Some(activation);
        Ok(())
    }

    fn activation(&self) -> Option<&Activation> {
        self.active.as_ref()
    }

    fn reset(&mut self) {
        self.active = None;
        self.reporting = None;
        self.set_actual(0);
    }

    fn on_queue(&mut self, queue: usize) -> Result<(), DeviceError> {
        let Some(active) = &self.active else {
            return Ok(());
        };
        if !active.queues.get(queue).is_some_and(QueueT::ready) {
            return Ok(());
        }
        let stats = active.has(F_STATS);
        match queue {
            INFLATE => self.inflate(),
            DEFLATE => self.deflate(),
            STATS if stats => self.read_stats(),
            _ if self.reporting == Some(queue) => self.report(queue),
            _ => Ok(()),
        }
    }

    fn save(&self) -> DeviceState {
        DeviceState::Balloon(BalloonState::V1 {
            target: self.target,
            actual: self.actual,
        })
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        let DeviceState::Balloon(BalloonState::V1 { target, actual }) = state else {
            return Err(RestoreError::Device("it is not that of a balloon"));
        };
        self.target = target;
        self.metrics.target_bytes.set(u64::from(target) * PAGE);
        self.set_actual(actual);
        Ok(())
    }

    fn counters(&self) -> Arc<dyn Counters> {
        Arc::clone(&self.metrics) as _
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rig;
    use forkd_vmm_proto::DeviceSlot;
    use std::io;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Taken(Mutex<Vec<(u64, u64)>>);

    impl MemoryReclaim for Taken {
        fn discard(&self, addr: u64, len: u64) -> io::Result<()> {
            self.0.lock().unwrap().push((addr, len));
            Ok(())
        }
    }

    fn rig_with(mask: u64, queues: usize) -> (Rig, Arc<Taken>) {
        let taken = Arc::new(Taken::default());
        let mut rig = Rig::new(DeviceSlot::Balloon);
        let balloon = Balloon::new(Arc::clone(&taken) as _);
        rig.transport
            .insert(Box::new(balloon), rig.memory.clone())
            .unwrap();
        rig.bring_up(mask, queues);
        assert_eq!(rig.status(), 15);
        (rig, taken)
    }

    fn pages(numbers: &[u32]) -> Vec<u8> {
        numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
    }

    #[test]
    fn inflated_pages_are_taken_in_runs() {
        let (mut rig, taken) = rig_with(u64::MAX, 5);
        rig.add(0, &[&pages(&[100, 101, 102, 200, 199, 50])], &[]);
        rig.kick(0);
        assert!(rig.used(0).is_some());
        let seen = taken.0.lock().unwrap().clone();
        let page = |n: u64| n * 4096;
        assert_eq!(
            seen,
            [
                (page(100), page(3)),
                (page(199), page(2)),
                (page(50), page(1))
            ]
        );
        assert_eq!(rig.counter("inflated_bytes"), page(6));
        rig.add(1, &[&pages(&[100])], &[]);
        rig.kick(1);
        assert_eq!(rig.counter("deflated_bytes"), page(1));
    }

    #[test]
    fn pages_outside_memory_are_not_touched() {
        let (mut rig, taken) = rig_with(u64::MAX, 5);
        rig.add(0, &[&pages(&[1023, 1024, u32::MAX])], &[]);
        rig.kick(0);
        assert!(taken.0.lock().unwrap().is_empty());
        assert_eq!(rig.counter("bad_ranges"), 2);
        assert!(!rig.needs_reset());
    }

    #[test]
    fn reported_pages_are_taken_whatever_the_number_of_the_queue() {
        for (queues, queue) in [(5, 4), (4, 3)] {
            let (mut rig, taken) = rig_with(u64::MAX, queues);
            let odd = (0x10_0000 + 512, 4096);
            rig.add_at(queue, &[], &[(0x10_0000, 0x8000), (0x20_0000, 0x1000), odd]);
            rig.kick(queue);
            assert!(rig.used(queue).is_some());
            let seen = taken.0.lock().unwrap().clone();
            assert_eq!(seen, [(0x10_0000, 0x8000), (0x20_0000, 0x1000)]);
            assert_eq!(rig.counter("bad_ranges"), 1);
        }
    }

    #[test]
    fn a_target_is_shown_and_announced() {
        let (rig, _) = rig_with(u64::MAX, 5);
        let generation = rig.get(0xfc);
        rig.transport
            .with(|balloon: &mut Balloon| balloon.set_target(64));
        assert_eq!(rig.get(0x100), 64 * 256);
        assert_eq!(rig.get(0x60), 2);
        assert_ne!(rig.get(0xfc), generation);
        rig.set(0x104, 77);
        assert_eq!(rig.get(0x104), 77);
        assert_eq!(rig.counter("actual_bytes"), 77 * 4096);
    }

    /// Asks the loop to pause with the first page.
    #[derive(Default)]
    struct PauseAtFirst {
        taken: Taken,
        handle: Mutex<Option<crate::LoopHandle>>,
    }

    impl MemoryReclaim for PauseAtFirst {
        fn discard(&self, addr: u64, len: u64) -> io::Result<()> {
            if let Some(handle) = self.handle.lock().unwrap().take() {
                handle.ask_pause()?;
            }
            self.taken.discard(addr, len)
        }
    }

    #[test]
    fn a_pause_does_not_wait_for_all_pages_of_a_chain() {
        for queue in [0, 4] {
            let reclaim = Arc::new(PauseAtFirst::default());
            let mut rig = Rig::new(DeviceSlot::Balloon);
            rig.start(Box::new(Balloon::new(Arc::clone(&reclaim) as _)));
            let handle = rig.event_loop.handle();
            *reclaim.handle.lock().unwrap() = Some(handle.clone());
            if queue == 0 {
                rig.add(queue, &[&pages(&[100, 200, 300])], &[]);
            } else {
                let ranges = [100u64, 200, 300].map(|page| (page * 4096, 4096));
                rig.add_at(queue, &[], &ranges);
            }
            rig.kick(queue);
            assert_eq!(reclaim.taken.0.lock().unwrap().len(), 1, "queue {queue}");
            assert_eq!(rig.used(queue), None);
            handle.resume().unwrap();
            rig.settle();
            assert!(rig.used(queue).is_some());
            let seen = reclaim.taken.0.lock().unwrap().clone();
            assert_eq!(seen[1..].len(), 3, "all of them, the first one again");
        }
    }

    fn stat(tag: u16, value: u64) -> Vec<u8> {
        [&tag.to_le_bytes()[..], &value.to_le_bytes()].concat()
    }

    #[test]
    fn statistics_are_read_and_the_buffer_comes_back_when_asked_for() {
        let (mut rig, taken) = rig_with(u64::MAX, 5);
        rig.add(
            2,
            &[&[stat(4, 1000), stat(99, 1), stat(5, 2000)].concat()],
            &[],
        );
        rig.kick(2);
        assert_eq!(rig.counter("guest_free"), 1000);
        assert_eq!(rig.counter("guest_total"), 2000);
        assert_eq!(rig.used(2), None);

        // The buffer is not lost when the machine goes on elsewhere.
        let balloon = Balloon::new(taken as _);
        let mut child = rig.restore_into(Box::new(balloon)).unwrap();
        child.settle();
        assert_eq!(child.counter("guest_free"), 1000);
        child
            .transport
            .with(|balloon: &mut Balloon| balloon.ask_for_stats())
            .unwrap()
            .unwrap();
        assert!(child.used(2).is_some());
        child.add(2, &[&stat(4, 500)], &[]);
        child.kick(2);
        assert_eq!(child.counter("guest_free"), 500);
    }
}
