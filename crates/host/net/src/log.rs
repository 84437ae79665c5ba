//! The flow log of one sandbox: a ring of the last entries.

use std::collections::VecDeque;
use std::time::{SystemTime, UNIX_EPOCH};

use forkd_net_proto::{FlowRecord, MAX_ENTRIES};

/// Entries that are kept.
const RING: usize = 1024;

#[derive(Debug, Default)]
pub struct FlowLog {
    ring: VecDeque<FlowRecord>,
    last: u64,
}

impl FlowLog {
    /// Adds an entry; its number and time are set here.
    pub fn add(&mut self, mut entry: FlowRecord) -> &FlowRecord {
        self.last += 1;
        entry.number = self.last;
        entry.unix_ms = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| {
                u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
            });
        if self.ring.len() == RING {
            self.ring.pop_front();
        }
        self.ring.push_back(entry);
        let last = self.ring.len() - 1;
        &self.ring[last]
    }

    /// The entries that are left, newest first.
    pub fn newest(&self) -> impl Iterator<Item = &FlowRecord> {
        self.ring.iter().rev()
    }

    /// The number of the newest entry; 0 without any.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// The oldest entries after a number, and how many between are gone.
    pub fn after(&self, number: u64) -> (Vec<FlowRecord>, u64) {
        let first = self
            .ring
            .front()
            .map_or(self.last + 1, |entry| entry.number);
        let lost = first.saturating_sub(number.saturating_add(1));
        let entries = self.ring.iter().filter(|entry| entry.number > number);
        (entries.take(MAX_ENTRIES).cloned().collect(), lost)
    }
}
