//! Messages that the VMM sends without a request.

use serde::{Deserialize, Serialize};

use crate::DeviceSlot;

/// A change in the VM that the VMM reports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The agent in the guest has connected to [`crate::READY_PORT`], or a guest without sockets has
    /// written to [`crate::READY_IO_PORT`].
    AgentReady,
    /// The instant of a cut or a checkpoint is captured: the new disk layers are in use, and the guest runs again unless it
    /// is to stay paused. Files are still being written.
    CutTaken {
        /// The number of the request that asked for it.
        seq: u64,
        /// How long the guest was stopped, in microseconds; 0 if it stays so.
        pause_us: u64,
    },
    /// The guest connected to a host port other than the ready port; one end of the stream comes along as
    /// the only descriptor.
    VsockConnect {
        /// The port on the host side.
        port: u32,
    },
    /// A device met input it cannot work with and stands still until the driver resets it.
    DeviceFailed {
        device: DeviceSlot,
        /// The invalid input, for people.
        reason: String,
    },
    /// The VM has ended; the process is about to exit with the matching [`ExitCode`].
    Stopped { cause: StopCause },
}

/// Why a VM ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StopCause {
    /// The guest powered off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest kernel panicked.
    GuestPanic,
    /// A vCPU did something that cannot be carried on from (a triple fault, an unknown exit).
    VcpuFailed,
    /// The controller asked.
    Asked,
}

/// The exit status of a VMM process: one for each cause, so that a supervisor that sees nothing else can
/// still tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ExitCode {
    /// The controller asked, or the guest powered off.
    Ok = 0,
    /// The guest asked for a reset.
    Reset = 10,
    /// The guest kernel panicked.
    GuestPanic = 11,
    /// A vCPU could not go on.
    VcpuFailed = 12,
    /// The control socket closed: no controller can send a command any more.
    ControlLost = 20,
    /// The command line or an inherited descriptor is wrong.
    BadStart = 21,
    /// The VMM itself failed.
    Internal = 70,
    /// A debug build made a system call outside its filter. A release build is killed by SIGSYS instead.
    Seccomp = 148,
}

impl From<StopCause> for ExitCode {
    fn from(cause: StopCause) -> Self {
        match cause {
            StopCause::PowerOff | StopCause::Asked => Self::Ok,
            StopCause::Reset => Self::Reset,
            StopCause::GuestPanic => Self::GuestPanic,
            StopCause::VcpuFailed => Self::VcpuFailed,
        }
    }
}
