//! Where things lie in the guest's physical address space, and which interrupt is whose.
//!
//! ```text
//!   0x0000_0000  RAM: start information, page tables, command line
//!   0x0009_f000  reserved: generation id, then the ACPI tables
//!   0x0010_0000  RAM: kernel, initial RAM disk at the top
//!   0xc000_0000  devices: virtio windows from 0xd000_0000
//!   0x1_0000_0000  RAM that did not fit below
//! ```

use forkd_vmm_proto::DeviceSlot;

/// Page tables for a 64-bit start: one page each of three levels.
pub const PAGE_TABLES: u64 = 0x1000;
pub const GDT: u64 = 0x500;
/// PVH start information, then the module list.
pub const PVH_INFO: u64 = 0x6000;
/// PVH memory map.
pub const PVH_MEMMAP: u64 = 0x6800;
/// The 64-bit protocol's boot parameters.
pub const ZERO_PAGE: u64 = 0x7000;
/// A stack for a guest that is not Linux.
pub const BOOT_STACK: u64 = 0x8ff0;
/// The kernel's command line.
pub const CMDLINE: u64 = 0x2_0000;
/// The longest command line, with its terminating zero.
pub const CMDLINE_MAX: usize = 2048;
/// Below this all is RAM; from here to [`HIGH_MEMORY`] it is reserved.
pub const RESERVED: u64 = 0x9_f000;
/// The page of the VM generation id.
pub const GENERATION: u64 = RESERVED;
/// The ACPI tables.
pub const ACPI_TABLES: u64 = 0xe_0000;
/// RAM goes on here.
pub const HIGH_MEMORY: u64 = 0x10_0000;

/// The first virtio register window.
pub const VIRTIO_WINDOWS: u64 = 0xd000_0000;
/// The local APICs.
pub const LOCAL_APIC: u32 = 0xfee0_0000;
/// The I/O APIC.
pub const IO_APIC: u32 = 0xfec0_0000;
/// Three pages that KVM needs on Intel, below 4 GiB and used by nothing else.
pub const KVM_TSS: usize = 0xfffb_d000;
/// One page that KVM needs on Intel.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;

/// The interrupt of the generation id.
pub const GENERATION_GSI: u32 = 9;
/// The interrupt of the power button.
pub const POWER_BUTTON_GSI: u32 = 10;
/// The first interrupt of the virtio slots.
pub const VIRTIO_GSI: u32 = 16;

/// The port of the panic device.
pub const PVPANIC_PORT: u16 = 0x505;
/// The first port of the power registers: sleep control, sleep status, reset.
pub const POWER_PORT: u16 = 0x600;
/// The value that resets the machine when written to the reset register.
pub const RESET_VALUE: u8 = 1;
/// The sleep type of "off".
pub const SLEEP_TYPE_OFF: u8 = 5;

/// The virtio slots that every VM has, in the order of their windows and interrupts.
pub const SLOTS: [DeviceSlot; 8] = [
    DeviceSlot::Rng,
    DeviceSlot::Balloon,
    DeviceSlot::Vsock,
    DeviceSlot::Net,
    DeviceSlot::Disk(0),
    DeviceSlot::Disk(1),
    DeviceSlot::Disk(2),
    DeviceSlot::Disk(3),
];

/// The register window of the slot at `place` in [`SLOTS`].
pub const fn window(place: usize) -> u64 {
    VIRTIO_WINDOWS + place as u64 * 0x1000
}

/// The interrupt of the slot at `place` in [`SLOTS`].
pub const fn slot_gsi(place: usize) -> u32 {
    VIRTIO_GSI + place as u32
}

#[cfg(test)]
mod tests {
    use forkd_vmm_proto::MAX_DISKS;

    use super::*;

    #[test]
    fn every_slot_has_an_interrupt_of_its_own() {
        assert!(slot_gsi(SLOTS.len() - 1) < 24, "the I/O APIC has 24 inputs");
        let disks = SLOTS
            .iter()
            .filter(|s| matches!(s, DeviceSlot::Disk(_)))
            .count();
        assert_eq!(disks, MAX_DISKS);
        assert!(window(SLOTS.len()) <= u64::from(IO_APIC));
        const { assert!(VIRTIO_WINDOWS >= forkd_memory::LOW_RAM_END) };
    }
}
