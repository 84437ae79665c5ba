//! The guest as a machine: clock, network, metrics, the way down.

use serde::{Deserialize, Serialize};

/// The agent answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pong {
    /// The agent's program version.
    pub version: String,
    /// How long the agent runs, milliseconds.
    pub uptime_ms: u64,
    /// The generation of the last identity request; empty before one.
    pub generation: String,
    /// The host name.
    pub hostname: String,
    /// The agent's process number.
    pub pid: u32,
    /// `guest`, `machine` or `process`.
    pub role: String,
    /// User processes are frozen: see [`FreezeRequest`].
    pub frozen: bool,
    /// Free and total memory are in the metrics; this is the kernel's release.
    pub kernel: String,
}

/// Reads the clocks, after setting the wall clock if asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClockRequest {
    /// Set the wall clock to this, nanoseconds since the epoch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set_unix_ns: Option<i64>,
    /// Move the wall clock by this, nanoseconds. Unlike a time, it does not age on its way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shift_ns: Option<i64>,
}

impl ClockRequest {
    /// Carrying the request out would set or move the wall clock.
    #[must_use]
    pub const fn changes_time(&self) -> bool {
        self.set_unix_ns.is_some() || self.shift_ns.is_some()
    }
}

/// The readings of the clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockState {
    /// The wall clock, nanoseconds since the epoch.
    pub unix_ns: i64,
    /// The monotonic clock, nanoseconds.
    pub monotonic_ns: i64,
    /// The monotonic clock with suspended time, nanoseconds.
    #[serde(default)]
    pub boottime_ns: i64,
    /// How far the wall clock was off when it was set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step_ns: Option<i64>,
}

/// Sets up an interface. What is missing stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NetworkRequest {
    /// Which one; the first that is not the loopback when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// Hardware address, `xx:xx:xx:xx:xx:xx`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// IPv4 address and prefix length, `10.0.0.2/24`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// IPv4 default route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// IPv6 address and prefix length.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address6: Option<String>,
    /// IPv6 default route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway6: Option<String>,
    /// The largest packet, bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Name servers for `/etc/resolv.conf`; an empty list leaves the file alone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<String>,
}

/// Resources that the guest uses.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Metrics {
    pub cpu: CpuMetrics,
    pub memory: MemoryMetrics,
    pub disks: Vec<DiskMetrics>,
    /// One, five and fifteen minutes.
    pub load: [f64; 3],
    /// Seconds since boot.
    pub uptime_s: f64,
    /// Processes in the guest.
    pub processes: u32,
    /// Resident memory of the agent, KiB.
    pub agent_rss_kib: u64,
    /// The wall clock of this reading, milliseconds since the epoch.
    pub unix_ms: u64,
}

/// Processor time since boot, milliseconds over all processors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CpuMetrics {
    /// How many there are.
    pub count: u32,
    /// Outside the kernel.
    pub user_ms: u64,
    /// In the kernel.
    pub system_ms: u64,
    pub idle_ms: u64,
    /// Waiting for disks.
    pub iowait_ms: u64,
    /// Taken by the host.
    pub steal_ms: u64,
}

/// Memory of the guest, KiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryMetrics {
    /// All of it.
    pub total_kib: u64,
    pub free_kib: u64,
    /// Memory that programs could still get.
    pub available_kib: u64,
    /// File content kept in memory.
    pub cached_kib: u64,
    /// Swap, all of it.
    pub swap_total_kib: u64,
    /// Swap that is free.
    pub swap_free_kib: u64,
}

/// One mounted disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DiskMetrics {
    /// Where it is mounted.
    pub mount: String,
    /// The kind of file system.
    pub fs: String,
    /// Size of the file system.
    pub total_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Left for programs, bytes.
    pub available_bytes: u64,
    /// Files it can hold; 0 where there is no limit.
    pub inodes: u64,
    /// Files it could still hold.
    pub inodes_free: u64,
}

/// Mounts a disk that the host has attached.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountVolumeRequest {
    /// The serial number of the disk.
    pub serial: String,
    /// Where it is mounted: an absolute path, which is made if it is missing.
    pub path: String,
    pub read_only: bool,
}

/// Brings the file system of a mount into the state of a clean unmount and holds every write to it, until a request lets
/// writes go on or the machine ends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HoldVolumeRequest {
    /// The path of the mount.
    pub path: String,
    /// Hold writes, or let them go on.
    pub held: bool,
}

/// Prepares the guest for a freeze.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuiesceRequest {
    /// Write everything to disk.
    pub sync: bool,
    /// Give cached file content back.
    pub drop_caches: bool,
    /// Let interpreters collect garbage and give memory back.
    pub collect: bool,
    /// Bring free memory together, so that it can be reported to the host in large parts.
    pub compact: bool,
    /// Tell the disk which blocks are free.
    pub trim: bool,
}

impl Default for QuiesceRequest {
    fn default() -> Self {
        Self {
            sync: true,
            drop_caches: false,
            collect: true,
            compact: false,
            trim: false,
        }
    }
}

/// The result of the preparation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuiesceReport {
    /// Memory free before, KiB.
    pub free_before_kib: u64,
    /// Memory free after, KiB.
    pub free_after_kib: u64,
    /// How long it took.
    pub took_ms: u64,
    /// Parts that failed; the others are done.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Freezes all user processes, before a cut. The agent itself goes on.
///
/// The frozen state is part of the cut: a child and a guest that is rolled back wake up with it. It ends with
/// [`crate::Request::Thaw`] in the source, and with [`crate::Request::Identity`] in a child or after a roll-back, when
/// the new identity is in force. Both leave user processes running, whether or not they were frozen.
///
/// While user processes are frozen the agent refuses to start others, with [`crate::ErrorCode::Busy`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FreezeRequest {
    /// How long freezing may take; two seconds when missing. A process that cannot be frozen in time, such as one that
    /// waits for a disk, is an error, and all processes run on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

/// User processes are frozen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FreezeReport {
    /// An earlier request had frozen them already.
    pub was_frozen: bool,
    /// Time from the request to the last process, microseconds.
    pub took_us: u64,
}

/// User processes run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ThawReport {
    /// They were frozen before.
    pub was_frozen: bool,
}

/// Ends the guest. The response comes before the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ShutdownRequest {
    pub mode: ShutdownMode,
    /// How long processes have between the polite signal and the other one; two seconds when missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_ms: Option<u64>,
}

/// How a guest ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ShutdownMode {
    #[default]
    Poweroff,
    Reboot,
}
