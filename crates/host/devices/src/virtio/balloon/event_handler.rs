//! The balloon's work on the device thread: inflating, deflating, reports and statistics.
//!
//! Giving pages back may be repeated, so a chain that a pause interrupts starts again afterwards.

use std::ops::ControlFlow;

use vm_memory::{GuestAddress, GuestMemory as _, Permissions};

use super::{Balloon, BalloonMetrics};
use crate::metrics::Counter;
use crate::virtio::{Chain, ChainReader, DeviceError, QueueExt, Verdict};
use crate::{GuestMemory, MemoryReclaim, Registrar};

pub(super) const INFLATE: usize = 0;
pub(super) const DEFLATE: usize = 1;
pub(super) const STATS: usize = 2;

/// The size of the pages that the balloon counts.
pub(super) const PAGE: u64 = 4096;
/// The most page numbers in one chain.
const MAX_PAGES: usize = 64 * 1024;
/// A tag of two bytes and a value of eight.
const STAT_LEN: usize = 10;
/// The most statistics in one chain.
const MAX_STATS: usize = 64;

impl Balloon {
    pub(super) fn inflate(&mut self) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let (metrics, reclaim) = (&self.metrics, self.reclaim.as_ref());
        let events = active.events.clone();
        active.drain(INFLATE, |memory, chain| {
            for_each_run(&mut chain.reader(memory), |first, pages| {
                let (addr, len) = (first * PAGE, pages * PAGE);
                discard(memory, reclaim, metrics, &metrics.inflated_bytes, addr, len);
                unless_paused(&events)
            })
        })
    }

    pub(super) fn deflate(&mut self) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let metrics = &self.metrics;
        active.drain(DEFLATE, |memory, chain| {
            // The pages come back by being touched; only their number is of interest.
            for_each_run(&mut chain.reader(memory), |_, pages| {
                metrics.deflated_bytes.add(pages * PAGE);
                ControlFlow::Continue(())
            })
        })
    }

    pub(super) fn report(&mut self, queue: usize) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let (metrics, reclaim) = (&self.metrics, self.reclaim.as_ref());
        let events = active.events.clone();
        active.drain(queue, |memory, chain: &Chain| {
            for (addr, len) in chain.writable() {
                if unless_paused(&events).is_break() {
                    return Ok(Verdict::Again);
                }
                discard(memory, reclaim, metrics, &metrics.reported_bytes, addr, len);
            }
            Ok(Verdict::Used(0))
        })
    }

    /// Reads the statistics and leaves the chain in the ring. The driver fills it again after
    /// `return_stats`.
    pub(super) fn read_stats(&mut self) -> Result<(), DeviceError> {
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let queue = active.queues.get_mut(STATS).ok_or(DeviceError::NoQueue)?;
        let Some(chain) = queue.next_chain(&active.memory)? else {
            return Ok(());
        };
        queue.put_back();
        let mut reader = chain.reader(&active.memory);
        for _ in 0..MAX_STATS {
            if reader.left() < STAT_LEN {
                break;
            }
            let tag = u16::from_le_bytes(reader.array()?);
            let value = u64::from_le_bytes(reader.array()?);
            if let Some(counter) = self.metrics.of_tag(tag) {
                counter.set(value);
            }
        }
        Ok(())
    }

    /// Gives the driver the chain back, which asks it for new statistics.
    pub(super) fn return_stats(&mut self) -> Result<(), DeviceError> {
        use virtio_queue::QueueT;
        let Some(active) = &mut self.active else {
            return Ok(());
        };
        let queue = active.queues.get_mut(STATS).ok_or(DeviceError::NoQueue)?;
        if !queue.ready() {
            return Ok(());
        }
        let Some(chain) = queue.next_chain(&active.memory)? else {
            return Ok(());
        };
        queue.finish(&active.memory, &chain, 0)?;
        if queue.enable_notification(&active.memory)? {
            active.again(STATS);
        }
        active.notify(STATS)
    }
}

impl BalloonMetrics {
    fn of_tag(&self, tag: u16) -> Option<&Counter> {
        Some(match tag {
            0 => &self.guest_swap_in,
            1 => &self.guest_swap_out,
            2 => &self.guest_major_faults,
            3 => &self.guest_minor_faults,
            4 => &self.guest_free,
            5 => &self.guest_total,
            6 => &self.guest_available,
            7 => &self.guest_caches,
            _ => return None,
        })
    }
}

/// Breaks off a chain when a pause waits: giving thousands of scattered pages back takes long, and may be
/// repeated.
fn unless_paused(events: &Registrar) -> ControlFlow<()> {
    if events.should_yield() {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

/// Calls `work` with the first page and the length of each run of page numbers that follow one another,
/// until it breaks off.
fn for_each_run(
    reader: &mut ChainReader<'_>,
    mut work: impl FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Verdict, DeviceError> {
    if reader.left() > MAX_PAGES * 4 {
        return Err(DeviceError::Protocol("a chain has too many page numbers"));
    }
    let mut run: Option<(u64, u64)> = None;
    while reader.left() >= 4 {
        let page = u64::from(u32::from_le_bytes(reader.array()?));
        run = match run {
            Some((first, pages)) if first + pages == page => Some((first, pages + 1)),
            // Linux takes pages from the top down.
            Some((first, pages)) if page + 1 == first => Some((page, pages + 1)),
            other => {
                if let Some((first, pages)) = other
                    && work(first, pages).is_break()
                {
                    return Ok(Verdict::Again);
                }
                Some((page, 1))
            }
        };
    }
    // The last run may break off too late to matter.
    if let Some((first, pages)) = run {
        let _ = work(first, pages);
    }
    Ok(Verdict::Used(0))
}

fn discard(
    memory: &GuestMemory,
    reclaim: &dyn MemoryReclaim,
    metrics: &BalloonMetrics,
    taken: &Counter,
    addr: u64,
    len: u64,
) {
    let aligned = addr.is_multiple_of(PAGE) && len.is_multiple_of(PAGE);
    let inside = usize::try_from(len)
        .is_ok_and(|len| memory.check_range(GuestAddress(addr), len, Permissions::Write));
    if !aligned || !inside {
        metrics.bad_ranges.inc();
    } else if reclaim.discard(addr, len).is_ok() {
        taken.add(len);
    } else {
        metrics.errors.inc();
    }
}
