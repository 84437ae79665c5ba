//! The parts of a VM, as the controller describes them to the VMM, and the reports of cuts, checkpoints and roll-backs.

use std::fmt;

use forkd_types::{Engine, MiB};
use serde::{Deserialize, Serialize};

/// The most disks one VM can have.
pub const MAX_DISKS: usize = 4;
/// The most vCPUs one VM can have.
pub const MAX_VCPUS: u8 = 32;
/// The least memory a VM can have, in MiB.
pub const MIN_MEMORY_MIB: u32 = 64;
/// The most memory a VM can have, in MiB.
pub const MAX_MEMORY_MIB: u32 = 64 * 1024;

/// The place of a descriptor among those that came with the message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FdIndex(pub u8);

/// Everything a shell is built from. It must be known before the VM is needed.
///
/// All virtio slots exist in every shell, at fixed addresses with their doorbells registered; a slot
/// that the later boot or restore does not fill shows the guest "no device".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Shape {
    /// The engine that builds and runs the VM.
    pub engine: Engine,
    pub memory: MiB,
    /// Number of vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// Which CPU features the guest may see.
    pub cpu: CpuModel,
}

/// A shell to be built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrepareSpec {
    /// Everything that has to be known before a VM is needed.
    pub shape: Shape,
    /// An open `/dev/kvm`. The VMM closes it once the shell stands.
    pub kvm: FdIndex,
    /// `/proc/PID/pagemap` of the VMM process. Without it every page counts as changed.
    ///
    /// The sender opens it after the VMM has answered the hello: a page map stays bound to the address space that
    /// the process had at that moment, and `execve` gives the process a new one.
    pub pagemap: Option<FdIndex>,
    /// The jail that the VMM enters before it builds the shell. `None` leaves the VMM as it was started.
    pub jail: Option<JailSpec>,
}

/// The most namespaces that a [`JailSpec`] names.
pub const MAX_NAMESPACES: usize = 8;

/// The jail of a VMM. A VMM that cannot put up one of these walls refuses to be prepared.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JailSpec {
    /// Namespaces to enter, in this order; at most [`MAX_NAMESPACES`].
    pub namespaces: Vec<FdIndex>,
    /// The user and group ID to take.
    pub user: Option<u32>,
    /// Deny every path with Landlock.
    pub landlock: bool,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            engine,
            memory,
            vcpus,
            cpu,
        } = self;
        let plural = if *vcpus == 1 { "" } else { "s" };
        let cpu = match cpu {
            CpuModel::Host => "the host's",
            CpuModel::Baseline => "baseline",
        };
        write!(
            f,
            "{memory}, {vcpus} vCPU{plural}, {cpu} CPU features, engine {engine}"
        )
    }
}

/// Which CPU features the guest may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CpuModel {
    /// All that KVM offers on this host.
    Host,
    /// The x86-64-v2 baseline: a snapshot taken with it can move to any host that has it.
    Baseline,
}

/// A cold boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootSpec {
    /// ELF `vmlinux` or bzImage.
    pub kernel: FdIndex,
    /// Initial RAM disk.
    pub initramfs: Option<FdIndex>,
    /// Kernel command line, as given; the VMM adds nothing to it.
    pub cmdline: String,
    /// Disks in slot order; the first is `/dev/vda`.
    pub disks: Vec<DiskSpec>,
    /// Network device; every VM has one.
    pub net: NetSpec,
    /// Hardware address of the network device. It is part of the state that a cut writes.
    pub mac: [u8; 6],
    pub vsock: VsockSpec,
    /// Where the guest's serial output goes.
    pub console: ConsoleSpec,
    /// The first VM generation id.
    pub generation: [u8; 16],
    /// Start the vCPUs at once, or stay paused before the first instruction.
    pub run: bool,
}

/// A start from frozen state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreSpec {
    /// The state file a cut wrote.
    pub state: FdIndex,
    /// The memory as of that cut.
    pub memory: MemoryImage,
    /// Disks in slot order; the same slots as in the state.
    pub disks: Vec<DiskSpec>,
    /// Network device; every VM has one. It keeps the hardware address of the state.
    pub net: NetSpec,
    pub vsock: VsockSpec,
    /// Where the guest's serial output goes.
    pub console: ConsoleSpec,
    /// The generation id of this child; never that of the parent.
    pub generation: [u8; 16],
    /// Pages to fault in before the first instruction, as a working-set file.
    pub prefault: Option<FdIndex>,
    /// Start the vCPUs at once, or stay paused.
    pub run: bool,
}

/// Guest memory as layers of files and an index that says which page comes from where.
///
/// The index is flat: it names the one layer that holds each page, however deep the chain of snapshots
/// behind it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryImage {
    /// The files that hold pages.
    pub layers: Vec<FdIndex>,
    /// Which page lies where.
    pub index: PageIndex,
}

/// Which page lies where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PageIndex {
    /// One layer, as long as guest memory, page N at offset N pages; holes are zero pages.
    Identity,
    /// A `forkd_formats::page_map::PageMap` in a file.
    File(FdIndex),
}

/// A disk of the VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskSpec {
    /// A raw image, shared and never written, unless it is the only layer and `read_only` is false. An empty file
    /// without layers makes a device of size zero, which [`crate::Command::AttachDisk`] gives its disk later.
    pub base: FdIndex,
    /// Thin layers over it, oldest first. Only the last is written.
    pub layers: Vec<FdIndex>,
    /// The guest cannot write.
    pub read_only: bool,
    /// The serial number that the guest sees, at most 20 bytes of ASCII.
    pub serial: String,
    /// Limits on bytes and operations.
    pub rate: RateLimit,
}

/// The network device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetSpec {
    /// The back end. A device without one drops the frames of the guest.
    pub backend: Option<NetAttachment>,
    /// Limits on bytes and operations, each way.
    pub rate: RateLimit,
}

/// A back end of the network device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetAttachment {
    /// The descriptor that carries frames.
    pub fd: FdIndex,
    /// The kind of the descriptor.
    pub kind: NetBackend,
}

/// The kind of descriptor that carries frames.
///
/// On every kind a `virtio_net_hdr_v1` of 12 bytes precedes each frame, and the device offers the guest the same
/// features, checksum and segmentation offload among them. So a snapshot restores with any back end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NetBackend {
    /// A tap device opened with `IFF_NO_PI | IFF_VNET_HDR` and a header of 12 bytes. Its opener decides with
    /// `TUNSETOFFLOAD` whether it gives frames in large pieces.
    Tap,
    /// A `SOCK_SEQPACKET` or `SOCK_DGRAM` socket, one header and frame per packet.
    Socket,
}

/// The socket device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockSpec {
    /// Context id of the guest, 3 or more.
    pub cid: u32,
    /// A listening `SOCK_STREAM` Unix socket. A client writes `CONNECT <port>\n`, reads
    /// `OK <host port>\n`, and then has a stream to that port in the guest.
    pub listener: FdIndex,
}

/// The serial console.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConsoleSpec {
    /// Where output is written: a file or a pipe. What does not fit is dropped and counted.
    pub output: FdIndex,
    /// Bytes a second that the guest may print after a burst of 64 KiB; 0 is no limit.
    pub bytes_per_second: u64,
    /// The console file is cut off at this size; 0 is no limit.
    pub max_bytes: u64,
}

/// A token bucket on bytes and one on operations; 0 is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateLimit {
    /// Bytes a second.
    pub bytes_per_second: u64,
    /// Bytes that may pass at once after a rest.
    pub burst_bytes: u64,
    /// Operations a second.
    pub ops_per_second: u64,
    /// Operations that may pass at once after a rest.
    pub burst_ops: u64,
}

/// The number of a memory image inside one VMM process.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub struct ImageId(pub u64);

impl ImageId {
    /// The image the VM was started from: the restored snapshot, or zero pages after a boot.
    pub const START: Self = Self(0);
}

/// The pages that a cut writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CutExtent {
    /// All pages. The memory file alone is the image.
    All,
    /// The pages that differ from an earlier image.
    Since {
        /// [`ImageId::START`], or the [`CutReport::image`] of the last cut that succeeded.
        image: ImageId,
        /// Output: the [`crate::PageMap`] over the layers of `image`, in their order, and the new memory file as the
        /// last layer. The file stays empty if the memory file is the only layer, after a boot.
        index: FdIndex,
    },
}

/// Take the machine's state at one instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CutSpec {
    /// Where vCPU and device state is written.
    pub state: FdIndex,
    /// Where pages are written, page N at offset N pages.
    pub memory: FdIndex,
    /// Which pages are written.
    pub extent: CutExtent,
    /// New, empty top layers, one for each writable disk in slot order. With them the VM goes on while
    /// the old layers belong to the cut; without them it must stay paused or be stopped. A cut that fails
    /// after [`crate::Event::CutTaken`] leaves the new layers in use.
    pub new_layers: Vec<FdIndex>,
    /// Let the vCPUs run again as soon as the instant is captured.
    pub resume: bool,
}

/// Keep the machine's state at one instant, to go back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointSpec {
    /// Where pages are kept that changed since the last checkpoint; empty, and for the VMM alone.
    pub memory: FdIndex,
    /// New, empty top layers, one for each writable disk in slot order.
    pub new_layers: Vec<FdIndex>,
}

/// The result of a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointReport {
    /// Its number, never 0.
    pub id: u64,
    /// Nothing changed since the checkpoint of that number: there is no new one, and what came with the
    /// command is not in use.
    pub unchanged: bool,
    /// For each writable disk whether the new layer is in use; it is not if nothing was written to the
    /// one before.
    pub layers_taken: Vec<bool>,
    /// From the first vCPU stopped to the last one running again, in microseconds.
    pub pause_us: u64,
    pub pages_written: u64,
    /// From the command to everything kept, in microseconds.
    pub total_us: u64,
}

/// Go back to a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackSpec {
    /// The number of the checkpoint.
    pub to: u64,
    /// New, empty top layers, one for each writable disk in slot order.
    pub new_layers: Vec<FdIndex>,
    /// A generation id the machine has not had before.
    pub generation: [u8; 16],
}

/// The result of a roll-back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackReport {
    /// From the first vCPU stopped to the last one running again, in microseconds.
    pub pause_us: u64,
    pub parts: PauseParts,
    /// Pages that were put back, by copying or by dropping what had changed.
    pub pages: u64,
}

/// The parts of a pause, in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseParts {
    /// Until vCPUs and devices stood still.
    pub stop_us: u64,
    /// Reading or loading the state of vCPUs and devices.
    pub state_us: u64,
    /// Finding out which pages changed.
    pub scan_us: u64,
    /// Keeping memory as it is (a fork), or putting it back.
    pub memory_us: u64,
    /// Putting layers on disks.
    pub disks_us: u64,
    /// Until they were told to go on.
    pub start_us: u64,
}

/// The result of a cut.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CutReport {
    /// The image that the cut is, for [`CutExtent::Since`]; never [`ImageId::START`].
    pub image: ImageId,
    /// From the first vCPU stopped to the last one running again, in microseconds.
    pub pause_us: u64,
    pub parts: PauseParts,
    /// Pages written to the memory file.
    pub pages_written: u64,
    /// Of the pages looked at, those that were zero and left as holes.
    pub zero_pages: u64,
    /// Bytes of state.
    pub state_bytes: u64,
    /// From the command to both files written and synced, in microseconds.
    pub total_us: u64,
}

/// A device as events and counters name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DeviceSlot {
    Rng,
    Balloon,
    Vsock,
    Net,
    /// Disk by slot.
    Disk(u8),
    Console,
}

/// Counters of the VMM since its start. Plain numbers by name, so that a new counter is not a new
/// protocol.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters(pub Vec<(String, u64)>);
