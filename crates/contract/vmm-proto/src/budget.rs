//! How many descriptors the messages of the protocol need.
//!
//! A restore is the largest message: one descriptor for each layer of memory and of each disk. Code that adds layers to
//! a snapshot keeps to these numbers, so that no snapshot is made that cannot be restored.

use crate::{MAX_DISKS, MAX_LAYERS};

/// The most descriptors that come with one packet.
pub const MAX_FDS: usize = 128;

/// The most descriptors that Linux sends with one packet (`SCM_MAX_FD`).
const KERNEL_MAX_FDS: usize = 253;

/// Frozen layers of one disk in a snapshot. More than these become one before the snapshot is made.
pub const MAX_DISK_LAYERS: usize = 16;

/// Descriptors of a restore beside memory and disks: state, working set, socket device, console, network.
const OTHERS: usize = 5;

/// The descriptors that the restore of a snapshot needs: `memory_layers` files of memory, their index, and for each
/// disk its base, its frozen layers and the new layer of the VM.
pub fn restore_fds(memory_layers: usize, disk_layers: impl IntoIterator<Item = usize>) -> usize {
    let disks: usize = disk_layers.into_iter().map(disk_fds).sum();
    OTHERS + memory_layers + 1 + disks
}

const fn disk_fds(frozen: usize) -> usize {
    1 + frozen + 1
}

const LARGEST_RESTORE: usize =
    OTHERS + MAX_LAYERS as usize + 1 + MAX_DISKS * disk_fds(MAX_DISK_LAYERS);

const _: () = assert!(
    LARGEST_RESTORE <= MAX_FDS,
    "the largest snapshot cannot be restored"
);
const _: () = assert!(
    MAX_FDS <= KERNEL_MAX_FDS,
    "the kernel refuses the largest packet"
);
const _: () = assert!(
    2 * crate::spawn::MAX_BATCH <= MAX_FDS,
    "the descriptors of a batch do not fit one packet"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_snapshot_fits_one_packet() {
        let disks = [MAX_DISK_LAYERS; MAX_DISKS];
        assert_eq!(restore_fds(MAX_LAYERS as usize, disks), LARGEST_RESTORE);
        assert!(restore_fds(MAX_LAYERS as usize, [MAX_FDS]) > MAX_FDS);
    }
}
