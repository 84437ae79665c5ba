//! The memory map that a kernel is given at its start.

use forkd_memory::RamLayout;

use super::layout;

/// Kind of a range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeKind {
    /// Memory that the kernel may use.
    Ram,
    Reserved,
}

/// A range of physical addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryRange {
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    pub kind: RangeKind,
}

/// The memory map of a VM.
pub fn memory_map(ram: RamLayout) -> Vec<MemoryRange> {
    let range = |start: u64, end: u64, kind| MemoryRange {
        start,
        len: end - start,
        kind,
    };
    let mut map = vec![
        range(0, layout::RESERVED, RangeKind::Ram),
        range(layout::RESERVED, layout::HIGH_MEMORY, RangeKind::Reserved),
    ];
    for region in ram.regions() {
        let start = region.guest.max(layout::HIGH_MEMORY);
        map.push(range(start, region.guest + region.len, RangeKind::Ram));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_covers_all_ram_once() {
        for mib in [64, 3072, 3073, 65536] {
            let layout = RamLayout::new(mib).unwrap();
            let map = memory_map(layout);
            assert_eq!(map.iter().map(|r| r.len).sum::<u64>(), layout.bytes());
            assert!(map.windows(2).all(|w| w[0].start + w[0].len <= w[1].start));
        }
    }
}
