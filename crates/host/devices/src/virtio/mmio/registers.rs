//! Register offsets and values of virtio-mmio version 2.

pub(super) const MAGIC_VALUE: u64 = 0x000;
pub(super) const VERSION: u64 = 0x004;
pub(super) const DEVICE_ID: u64 = 0x008;
pub(super) const VENDOR_ID: u64 = 0x00c;
pub(super) const DEVICE_FEATURES: u64 = 0x010;
pub(super) const DEVICE_FEATURES_SEL: u64 = 0x014;
pub(super) const DRIVER_FEATURES: u64 = 0x020;
pub(super) const DRIVER_FEATURES_SEL: u64 = 0x024;
pub(super) const QUEUE_SEL: u64 = 0x030;
pub(super) const QUEUE_NUM_MAX: u64 = 0x034;
pub(super) const QUEUE_NUM: u64 = 0x038;
pub(super) const QUEUE_READY: u64 = 0x044;
pub(super) const QUEUE_NOTIFY: u64 = 0x050;
pub(super) const INTERRUPT_STATUS: u64 = 0x060;
pub(super) const INTERRUPT_ACK: u64 = 0x064;
pub(super) const STATUS: u64 = 0x070;
pub(super) const QUEUE_DESC_LOW: u64 = 0x080;
pub(super) const QUEUE_DESC_HIGH: u64 = 0x084;
pub(super) const QUEUE_DRIVER_LOW: u64 = 0x090;
pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x094;
pub(super) const QUEUE_DEVICE_LOW: u64 = 0x0a0;
pub(super) const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
pub(super) const SHM_LEN_LOW: u64 = 0x0b0;
pub(super) const SHM_BASE_HIGH: u64 = 0x0bc;
pub(super) const CONFIG_GENERATION: u64 = 0x0fc;
pub(super) const CONFIG: u64 = 0x100;

/// "virt" as a little-endian number.
pub(super) const MAGIC: u32 = u32::from_le_bytes(*b"virt");
/// "frkd" as a little-endian number.
pub(super) const VENDOR: u32 = u32::from_le_bytes(*b"frkd");

/// Bits of the device status register.
pub(super) mod status {
    pub(crate) const ACKNOWLEDGE: u32 = 1;
    pub(crate) const DRIVER: u32 = 2;
    pub(crate) const DRIVER_OK: u32 = 4;
    pub(crate) const FEATURES_OK: u32 = 8;
    pub(crate) const NEEDS_RESET: u32 = 64;
    pub(crate) const FAILED: u32 = 128;

    /// Bits that a driver may set.
    pub(crate) const DRIVER_BITS: u32 = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED;
    /// Bits that must be set before queues are set up.
    pub(crate) const NEGOTIATED: u32 = ACKNOWLEDGE | DRIVER | FEATURES_OK;
    /// Bits that are set while the device works.
    pub(crate) const RUNNING: u32 = NEGOTIATED | DRIVER_OK;
}
