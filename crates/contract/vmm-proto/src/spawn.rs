//! The protocol between the controller and `forkd-spawn`.
//!
//! `forkd-spawn` starts VMM processes, keeps a pool of prepared shells and hands out their control
//! sockets. It keeps a copy of every socket it hands out: a controller that dies and comes back asks for
//! them again ([`SpawnCommand::Adopt`]) and finds every VM where it was. When `forkd-spawn` itself ends, the
//! kernel kills every VMM it started. Its successor on the same socket kills what is left in their cgroups.
//!
//! The wire is that of the VMM protocol: one `SOCK_SEQPACKET` packet a message, descriptors alongside.

use forkd_types::{Digest, Engine, SandboxId};
use serde::{Deserialize, Serialize};

pub use crate::walls::{
    IoLimit, Jail, Limits, MAX_CPU_WEIGHT, MAX_IO_LIMITS, MissingWall, Wall, Walls,
};
use crate::{Capabilities, Shape};

/// The version both sides name in their hello. `forkd-spawn` speaks to VMMs too, so it stands for that version as well.
pub const SPAWN_VERSION: u32 = 4 << 16 | crate::PROTOCOL_VERSION;

/// The most VMs one [`SpawnCommand::Take`] or one [`SpawnReply::Adopted`] speaks of.
pub const MAX_BATCH: usize = 32;

/// The most files that `forkd-spawn` keeps for controllers.
pub const MAX_KEPT: usize = 1 << 14;

/// The most shells one pool can be asked to keep.
pub const MAX_POOL: u32 = 2048;

/// A command with the number its answer will carry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnRequest {
    /// Chosen by the controller; any value.
    pub seq: u64,
    pub command: SpawnCommand,
}

/// A command of the controller to `forkd-spawn`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpawnCommand {
    /// The first message on a connection.
    Hello {
        /// The version the controller speaks.
        version: u32,
    },
    /// Keep this many shells of a shape ready; 0 lets the pool run dry.
    SetPool { shape: Shape, depth: u32 },
    /// Hand out one shell for each id, from the pool where it has one, newly made where not.
    Take {
        shape: Shape,
        /// Who they are for; at most [`MAX_BATCH`].
        ids: Vec<SandboxId>,
        /// Limits on each of the VMs. A limit that this host cannot keep refuses the whole command.
        limits: Limits,
        /// The jail that each of the VMs has to be in.
        jail: Jail,
    },
    /// Replace the limits of a live VM.
    SetLimits {
        id: SandboxId,
        /// The new limits; a missing value lifts the limit.
        limits: Limits,
    },
    /// Hand out the control sockets of VMs that were taken before.
    Adopt {
        /// Start after this id, in their order; `None` starts at the first.
        after: Option<SandboxId>,
    },
    /// End a VM with `SIGKILL`: its VMM and everything in its cgroup. Answered when all of it has ended and the id is
    /// free again.
    Kill { id: SandboxId },
    /// Ask how the pools stand.
    Status,
    /// Keep a copy of the descriptors that come along, one for each name, for a later controller.
    Keep {
        /// At most [`MAX_BATCH`].
        names: Vec<Digest>,
    },
    /// Close the kept descriptors of these names.
    Release { names: Vec<Digest> },
    /// Hand out copies of kept descriptors.
    Kept {
        /// Start after this name, in their order; `None` starts at the first.
        after: Option<Digest>,
    },
}

/// A message from `forkd-spawn`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromSpawn {
    /// The answer to the request of this number.
    Response {
        /// The number of the request.
        seq: u64,
        result: Result<SpawnReply, SpawnError>,
    },
    /// A VMM that was handed out has ended.
    Exited {
        id: SandboxId,
        /// Its process id, now free.
        pid: u32,
        how: HowEnded,
    },
}

/// The result of a command that succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpawnReply {
    /// Reply to `Hello`.
    Hello {
        /// The version `forkd-spawn` speaks.
        version: u32,
        /// The engines that `forkd-spawn` has a program for.
        engines: Vec<Engine>,
        /// The walls that stand around every VM of the engine `forkd`.
        walls: Walls,
        /// The walls that do not stand, with reasons.
        missing: Vec<MissingWall>,
    },
    /// Done; there is nothing to say.
    Done,
    /// To `Take`. Two descriptors for each entry come along, in the same order: control socket and pidfd.
    Taken(Vec<Vm>),
    /// To `Adopt`, with the same descriptors.
    Adopted {
        /// The VMs, in order of their ids.
        vms: Vec<Vm>,
        /// There are more; ask again after the last id.
        more: bool,
    },
    /// Reply to `Status`.
    Status(SpawnStatus),
    /// To `Kept`. One descriptor for each name comes along, in the same order.
    Kept {
        names: Vec<Digest>,
        /// There are more; ask again after the last name.
        more: bool,
    },
}

/// A VMM process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// Who it is for.
    pub id: SandboxId,
    /// Its process id.
    pub pid: u32,
    pub shape: Shape,
    /// The abilities that its VMM announced.
    pub capabilities: Capabilities,
    /// It stood ready in the pool.
    pub pooled: bool,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HowEnded {
    /// With an exit status.
    Code(u8),
    /// By a signal.
    Signal(u8),
}

/// How the pools stand.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnStatus {
    /// Each pool that has a depth or shells.
    pub pools: Vec<PoolStatus>,
    /// VMs handed out and alive.
    pub live: u32,
    /// Shells that died before they were handed out, since start.
    pub shells_lost: u64,
}

/// The state of one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    pub shape: Shape,
    /// How many there should be.
    pub depth: u32,
    /// How many stand ready.
    pub ready: u32,
    /// How many are being made.
    pub making: u32,
}

/// Why a command was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum SpawnError {
    /// The protocol versions differ.
    #[error("forkd-spawn speaks version {ours}, the controller {theirs}")]
    Version {
        /// The version of `forkd-spawn`.
        ours: u32,
        /// The version of the controller.
        theirs: u32,
    },
    /// Another command came before the hello.
    #[error("the first message must be a hello")]
    NoHello,
    /// A number is out of range.
    #[error("{what} is out of range: {value}, at most {limit}")]
    OutOfRange {
        /// The name of the number.
        what: String,
        value: u64,
        limit: u64,
    },
    /// The id is already in use by a VM that lives.
    #[error("{id} is already taken")]
    Duplicate { id: SandboxId },
    /// No VM of that id lives.
    #[error("there is no VM {id}")]
    Unknown { id: SandboxId },
    /// A wall that the command asks for cannot be had.
    #[error("{wall} cannot be had on this host: {reason}")]
    NoWall { wall: String, reason: String },
    /// The shape asks for an engine that this host does not run.
    #[error("this host runs VMs with the engines {}, not {wanted}", list(have))]
    OtherEngine {
        /// The engine of the shape.
        wanted: Engine,
        /// The engines that have a program.
        have: Vec<Engine>,
    },
    /// A message came with another number of descriptors than it names.
    #[error("the message names {names} descriptors and has {found}")]
    Descriptors { names: u32, found: u32 },
    /// A shell could not be made.
    #[error("no shell could be made: {reason}")]
    ShellFailed {
        /// The message of the VMM or the kernel.
        reason: String,
    },
}

fn list(engines: &[Engine]) -> String {
    let names: Vec<&str> = engines.iter().map(Engine::as_str).collect();
    names.join(", ")
}
