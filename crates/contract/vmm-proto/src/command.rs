//! Commands of the controller and replies of the VMM.
//!
//! The controller sends a [`Request`]; the VMM answers each with exactly one [`ResponseTo`] of the same number.
//! [`VmmError`] states how a failed command leaves the VM.

use forkd_types::Engine;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    BootSpec, Capabilities, CheckpointReport, CheckpointSpec, Counters, CutReport, CutSpec,
    DiskSpec, FdIndex, NetAttachment, PrepareSpec, RestoreSpec, RollbackReport, RollbackSpec,
    Shape,
};

/// A command with the number its answer will carry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the controller; any value.
    pub seq: u64,
    pub command: Command,
}

/// A command of the controller to the VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// The first message on a connection.
    Hello {
        /// The version the controller speaks.
        version: u32,
    },
    /// Build the shell.
    Prepare(PrepareSpec),
    /// Fill the shell from a kernel and run it.
    Boot(Box<BootSpec>),
    /// Fill the shell from frozen state.
    Restore(Box<RestoreSpec>),
    /// Stop vCPUs and devices.
    Pause,
    /// Let them go on.
    Resume,
    /// Take the state at one instant. Cuts, checkpoints and roll-backs are carried out one after another, in
    /// the order in which they are asked for.
    Cut(CutSpec),
    /// Keep the state at one instant inside the VMM, to go back to.
    Checkpoint(CheckpointSpec),
    /// Go back to a checkpoint. Connections of the guest are reset; it finds a new generation id.
    Rollback(RollbackSpec),
    /// Forget a checkpoint.
    DropCheckpoint { id: u64 },
    /// Take one layer that reads the same in place of all layers that lie below the one a disk writes to.
    MergedLayer {
        /// Which of the writable disks, in slot order.
        disk: u8,
        layer: FdIndex,
    },
    /// Exchange the back end of the network device, of a VM that runs or is paused. Frames that the guest has queued go
    /// to the new back end; a frame of the old one that the guest has not taken yet is dropped.
    SetNet {
        /// The new back end; without one the device drops the frames of the guest.
        backend: Option<NetAttachment>,
    },
    /// Press the power button; the guest decides what to do about it.
    PowerButton,
    /// Set how much memory the balloon should take from the guest, in MiB.
    Balloon {
        /// The new size of the balloon.
        target_mib: u32,
    },
    /// Write down which pages the guest has touched since boot or restore, for
    /// [`RestoreSpec::prefault`].
    WorkingSet {
        /// The file that the pages are written to.
        output: FdIndex,
    },
    /// End the VMM process now.
    Stop,
    /// Ask for the phase.
    Status,
    /// Ask for the counters.
    Counters,
    /// Give an empty disk slot its disk, of a VM that runs or is paused. The guest learns of the new size.
    AttachDisk {
        /// The slot, which the boot or restore filled with an empty file.
        slot: u8,
        /// A writable disk.
        disk: DiskSpec,
    },
}

/// An answer to the request of the same number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResponseTo {
    /// The number of the request.
    pub seq: u64,
    pub result: Result<Reply, VmmError>,
}

/// The result of a command that succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Reply to `Hello`.
    Hello {
        /// The version the VMM speaks.
        version: u32,
        /// The program's own version, for people.
        program: String,
        /// The engine that the VMM is.
        engine: Engine,
        /// The abilities of the engine.
        capabilities: Capabilities,
    },
    /// Done; there is nothing to say.
    Done,
    /// Reply to `Status`.
    Status(Status),
    /// Reply to `Counters`.
    Counters(Counters),
    /// To `Cut`, once everything is written. [`crate::Event::CutTaken`] comes before it, as soon as the
    /// instant is captured.
    Cut(CutReport),
    /// To `Checkpoint`, once its memory is kept. [`crate::Event::CutTaken`] comes before it unless nothing has changed.
    Checkpoint(CheckpointReport),
    /// Reply to `Rollback`.
    Rollback(RollbackReport),
}

/// Where a VM is in its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub phase: VmmPhase,
    /// The shape, once prepared.
    pub shape: Option<Shape>,
    /// The agent has connected to the ready port since boot or restore.
    pub agent_ready: bool,
}

/// The phases of a VMM process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum VmmPhase {
    /// Connected, nothing built.
    Empty,
    /// The shell exists.
    Shell,
    /// The guest runs.
    Running,
    /// The guest is stopped at an instruction.
    Paused,
}

/// Why a command failed.
///
/// The VM after a failed command:
///
/// | command | state of the VM |
/// |---|---|
/// | `Hello`, `Prepare`, `Status`, `Counters`, `AttachDisk` | unchanged |
/// | `Boot` | the shell is used up; only `Stop` is left |
/// | `Restore` | unchanged if the snapshot was refused while it was read and checked; else the shell is used up |
/// | `Pause`, `Resume` | unchanged, in the phase that [`Command::Status`] reports |
/// | `Cut`, `Checkpoint` before [`crate::Event::CutTaken`] | unchanged; the new disk layers are not in use |
/// | `Cut`, `Checkpoint` after [`crate::Event::CutTaken`] | runs, on the new disk layers; there is no cut or checkpoint |
/// | `Rollback` before the vCPUs were stopped | unchanged |
/// | `Rollback` later | between two states: the VMM ends, with [`crate::Event::Stopped`] |
/// | `DropCheckpoint`, `MergedLayer`, `SetNet`, `Balloon`, `PowerButton` | unchanged |
/// | `WorkingSet` | unchanged; the output file may be half-written |
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[error("{message}")]
pub struct VmmError {
    pub code: VmmErrorCode,
    /// The chain of causes, for people.
    pub message: String,
}

/// The kind of failure, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum VmmErrorCode {
    /// The command does not fit the phase.
    WrongPhase,
    /// A field is out of range, or a descriptor is missing or of the wrong kind.
    BadRequest,
    /// The protocol versions differ.
    Version,
    /// The kernel image cannot be loaded.
    BadKernel,
    /// The snapshot is damaged or not one.
    BadSnapshot,
    /// The snapshot is whole but this host or shape cannot run it.
    Incompatible,
    /// KVM refused a request.
    Kvm,
    /// Memory could not be had.
    Memory,
    /// A descriptor could not be read or written.
    Io,
    /// No space left where the cut is written.
    NoSpace,
    /// There is no such checkpoint.
    NoCheckpoint,
    /// There are as many checkpoints or waiting commands as there can be.
    TooMany,
    /// The engine lacks the operation, see [`Capabilities`].
    Unsupported,
}
