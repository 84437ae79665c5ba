//! The protocol between the controller and a VMM process.
//!
//! The two share one `SOCK_SEQPACKET` Unix socket: a packet is one message, encoded with postcard, and
//! the descriptors a message speaks of travel with it as `SCM_RIGHTS`. A message names a descriptor by
//! its place in that array ([`FdIndex`]), so the VMM never opens a path.
//!
//! ```text
//!   started ──Hello──► greeted ──Prepare──► shell ──Boot──►    running ⇄ paused ──Stop──► gone
//!                                             └────Restore──►  (paused or running)
//! ```
//!
//! A *shell* is a VM that exists (memory slot over reserved address space, vCPUs, interrupt
//! controllers, doorbells) but has no memory and no state yet; making one waits for grace periods in the
//! kernel, filling one does not. Every command is answered by exactly one [`Reply`] with the same
//! sequence number; [`Event`]s come unasked in between.

mod budget;
mod cmdline;
mod command;
mod counters;
mod engine;
mod event;
mod fds;
mod flags;
mod received;
pub mod spawn;
mod spec;
mod walls;
mod wire;

pub use budget::{MAX_DISK_LAYERS, MAX_FDS, restore_fds};
pub use cmdline::LINUX_CMDLINE;
pub use command::{Command, Reply, Request, ResponseTo, Status, VmmError, VmmErrorCode, VmmPhase};
pub use counters::{COUNTERS, CounterInfo, CounterKind, KnownCounter};
pub use engine::{Capabilities, Capability};
pub use event::{Event, ExitCode, StopCause};
pub use fds::{FdList, TooManyFds};
pub use flags::{Flag, FlagSet};
// A cut writes a page map and a restore reads one.
pub use forkd_formats::page_map::{Change, Extent, MAX_EXTENTS, MAX_LAYERS, PageMap, PageMapError};
pub use received::{FdError, Fds};
pub use spec::{
    BootSpec, CheckpointReport, CheckpointSpec, ConsoleSpec, Counters, CpuModel, CutExtent,
    CutReport, CutSpec, DeviceSlot, DiskSpec, FdIndex, ImageId, JailSpec, MAX_DISKS,
    MAX_MEMORY_MIB, MAX_NAMESPACES, MAX_VCPUS, MIN_MEMORY_MIB, MemoryImage, NetAttachment,
    NetBackend, NetSpec, PageIndex, PauseParts, PrepareSpec, RateLimit, RestoreSpec,
    RollbackReport, RollbackSpec, Shape, VsockSpec,
};
pub use wire::{FromVmm, MAX_MESSAGE, WireError, decode, encode};

/// The version both sides name in their hello. A VMM refuses a controller that speaks another one.
pub const PROTOCOL_VERSION: u32 = 7;

/// The first bytes of a state file.
pub const STATE_MAGIC: &[u8; 8] = b"FORKDVMS";
/// The format of state files, as a little-endian number behind the magic.
pub const STATE_FORMAT: u32 = 1;

/// The vsock port on the host side (CID 2) that the agent connects to once, when it is ready.
pub const READY_PORT: u32 = 1;

/// The vsock port that the agent listens on inside the guest.
pub const AGENT_PORT: u32 = 1024;

/// The I/O port on which a guest without sockets says that it is ready, by writing any byte.
pub const READY_IO_PORT: u16 = 0x5f0;
