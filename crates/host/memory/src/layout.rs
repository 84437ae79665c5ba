//! The place of RAM in the guest's physical address space.
//!
//! RAM is one or two regions around the hole for devices below 4 GiB ([`LOW_RAM_END`]). In this process both
//! regions are one range, so a page number is an offset in that range.

use forkd_vmm_proto::{MAX_MEMORY_MIB, MIN_MEMORY_MIB};

/// The page size of every guest.
pub const PAGE_SIZE: u64 = 4096;
/// RAM below this address is contiguous from zero; devices live from here to 4 GiB.
pub const LOW_RAM_END: u64 = 3 << 30;
/// RAM that does not fit below the devices goes on here.
pub const HIGH_RAM_START: u64 = 4 << 30;

/// One contiguous piece of RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamRegion {
    /// Guest physical address.
    pub guest: u64,
    /// Offset in the RAM as a whole, and in its image.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// RAM of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamLayout {
    bytes: u64,
}

impl RamLayout {
    /// A layout of `mib` MiB; `None` if a VM must not have that size.
    pub fn new(mib: u32) -> Option<Self> {
        (MIN_MEMORY_MIB..=MAX_MEMORY_MIB)
            .contains(&mib)
            .then_some(Self {
                bytes: u64::from(mib) << 20,
            })
    }

    /// All of it, in bytes.
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// All of it, in pages.
    pub fn pages(self) -> u32 {
        // At most 64 GiB, so the number of pages fits easily.
        (self.bytes / PAGE_SIZE) as u32
    }

    /// The pieces in order of address.
    pub fn regions(self) -> impl Iterator<Item = RamRegion> {
        let low = self.bytes.min(LOW_RAM_END);
        let low_region = RamRegion {
            guest: 0,
            offset: 0,
            len: low,
        };
        let high_region = RamRegion {
            guest: HIGH_RAM_START,
            offset: low,
            len: self.bytes - low,
        };
        [low_region, high_region]
            .into_iter()
            .filter(|region| region.len > 0)
    }

    /// The guest physical addresses of a part of RAM, with their lengths: one piece, or two around the devices.
    pub fn guest_pieces(self, offset: u64, len: u64) -> impl Iterator<Item = (u64, u64)> {
        self.regions().filter_map(move |region| {
            let start = offset.max(region.offset);
            let end = offset.saturating_add(len).min(region.offset + region.len);
            (start < end).then(|| (region.guest + start - region.offset, end - start))
        })
    }

    /// The offset in RAM of `len` bytes at a guest physical address, if all of it is RAM.
    pub fn offset_of(self, guest: u64, len: u64) -> Option<u64> {
        self.regions().find_map(|region| {
            let inside = guest.checked_sub(region.guest)?;
            (inside.checked_add(len)? <= region.len).then_some(region.offset + inside)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_ram_is_one_piece() {
        let layout = RamLayout::new(512).unwrap();
        assert_eq!(layout.regions().count(), 1);
        assert_eq!(layout.offset_of(0, 512 << 20), Some(0));
        assert_eq!(layout.offset_of(1, 512 << 20), None);
    }

    #[test]
    fn a_part_of_ram_may_lie_on_both_sides_of_the_devices() {
        let layout = RamLayout::new(8192).unwrap();
        let pieces = |offset, len| layout.guest_pieces(offset, len).collect::<Vec<_>>();
        assert_eq!(pieces(4096, 8192), [(4096, 8192)]);
        assert_eq!(
            pieces(LOW_RAM_END - 4096, 12288),
            [(LOW_RAM_END - 4096, 4096), (HIGH_RAM_START, 8192)]
        );
        assert_eq!(
            pieces((8 << 30) - 4096, u64::MAX),
            [((9 << 30) - 4096, 4096)]
        );
    }

    #[test]
    fn large_ram_leaves_room_for_devices() {
        let layout = RamLayout::new(8192).unwrap();
        let regions: Vec<_> = layout.regions().collect();
        assert_eq!(regions.len(), 2);
        assert_eq!(regions.iter().map(|r| r.len).sum::<u64>(), 8 << 30);
        assert_eq!(layout.offset_of(HIGH_RAM_START, 4096), Some(LOW_RAM_END));
        assert_eq!(layout.offset_of(LOW_RAM_END - 1, 2), None);
        assert_eq!(layout.offset_of(0xfee0_0000, 4), None);
        assert_eq!(layout.offset_of(u64::MAX, 1), None);
        assert_eq!(layout.offset_of(9 << 30, 1), None);
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        assert_eq!(RamLayout::new(63), None);
        assert_eq!(RamLayout::new(64 * 1024 + 1), None);
        assert!(RamLayout::new(64 * 1024).is_some());
    }
}
