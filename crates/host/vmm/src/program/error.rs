//! Errors on the wire: a code that a program can act on, and the error chain as text.

use std::error::Error;
use std::io;

pub use forkd_types::chain;
use forkd_vmm_proto::{VmmError, VmmErrorCode};

use crate::machine::{
    BootError, CheckpointError, CutError, DeviceSetError, PauseError, PrepareError, RestoreError,
    RollbackError,
};

/// An error for the wire.
pub fn wire_error(code: VmmErrorCode, error: &(dyn Error + 'static)) -> VmmError {
    VmmError {
        code,
        message: chain(error),
    }
}

fn is_no_space(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>()
            && matches!(
                io.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            )
        {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The code of an error on the wire.
pub trait Code: Error + Sized + 'static {
    fn code(&self) -> VmmErrorCode;

    /// For the wire.
    fn wire(&self) -> VmmError {
        let code = if is_no_space(self) {
            VmmErrorCode::NoSpace
        } else {
            self.code()
        };
        wire_error(code, self)
    }
}

impl Code for PrepareError {
    fn code(&self) -> VmmErrorCode {
        match self {
            Self::Shape { .. } | Self::Engine { .. } => VmmErrorCode::BadRequest,
            Self::Kvm(_) | Self::Devices(_) => VmmErrorCode::Kvm,
            Self::Memory(_) | Self::Vcpu(_) | Self::Thread(_) => VmmErrorCode::Memory,
        }
    }
}

fn device_code(error: &DeviceSetError) -> VmmErrorCode {
    match error {
        DeviceSetError::Io(_) => VmmErrorCode::Io,
        DeviceSetError::Bus(_) | DeviceSetError::Kvm(_) => VmmErrorCode::Kvm,
        DeviceSetError::Fd(_)
        | DeviceSetError::TooManyDisks { .. }
        | DeviceSetError::Backend { .. } => VmmErrorCode::BadRequest,
        DeviceSetError::Slot(_) | DeviceSetError::Serial(_) => VmmErrorCode::BadSnapshot,
        DeviceSetError::Absent { .. } | DeviceSetError::Differs { .. } => {
            VmmErrorCode::Incompatible
        }
    }
}

impl Code for BootError {
    fn code(&self) -> VmmErrorCode {
        match self {
            Self::Used => VmmErrorCode::WrongPhase,
            Self::Fd(_) => VmmErrorCode::BadRequest,
            Self::Memory(_) | Self::Generation(_) => VmmErrorCode::Memory,
            Self::Devices(error) => device_code(error),
            Self::Acpi(_) | Self::Structures(_) => VmmErrorCode::Memory,
            Self::Kernel(_) => VmmErrorCode::BadKernel,
            Self::Kvm(_) => VmmErrorCode::Kvm,
        }
    }
}

impl Code for RestoreError {
    fn code(&self) -> VmmErrorCode {
        use crate::kvm::KvmError;
        use forkd_memory::MemoryError;
        match self {
            Self::Used => VmmErrorCode::WrongPhase,
            Self::Fd(_) => VmmErrorCode::BadRequest,
            Self::Read { .. } => VmmErrorCode::Io,
            Self::TooLarge { .. } | Self::State(_) | Self::PageMap(_) | Self::WorkingSet(_) => {
                VmmErrorCode::BadSnapshot
            }
            Self::Shape { .. } | Self::Cpu { .. } => VmmErrorCode::Incompatible,
            Self::Memory(
                MemoryError::Size { .. }
                | MemoryError::Layers { .. }
                | MemoryError::Truncated { .. },
            ) => VmmErrorCode::BadSnapshot,
            Self::Memory(_) | Self::Generation(_) => VmmErrorCode::Memory,
            Self::Kvm(KvmError::Msr { .. } | KvmError::Size { .. } | KvmError::TscRate { .. }) => {
                VmmErrorCode::Incompatible
            }
            Self::Kvm(_) => VmmErrorCode::Kvm,
            Self::Devices(error) => device_code(error),
        }
    }
}

impl Code for CutError {
    fn code(&self) -> VmmErrorCode {
        match self {
            Self::Phase { .. } => VmmErrorCode::WrongPhase,
            Self::Fd(_) | Self::Layers { .. } | Self::NoImage { .. } | Self::Disk { .. } => {
                VmmErrorCode::BadRequest
            }
            Self::Pause(_) | Self::Kvm(_) => VmmErrorCode::Kvm,
            Self::Memory(_) | Self::Fork(_) => VmmErrorCode::Memory,
            Self::State(_) | Self::PageMap(_) | Self::Flush { .. } | Self::Write { .. } => {
                VmmErrorCode::Io
            }
        }
    }
}

impl Code for CheckpointError {
    fn code(&self) -> VmmErrorCode {
        match self {
            Self::Full => VmmErrorCode::TooMany,
            Self::InPlace { .. } => VmmErrorCode::BadRequest,
            Self::Cut(error) => error.code(),
            Self::Write(_) => VmmErrorCode::Io,
        }
    }
}

impl Code for RollbackError {
    fn code(&self) -> VmmErrorCode {
        match self {
            Self::Phase { .. } => VmmErrorCode::WrongPhase,
            Self::NoCheckpoint { .. } => VmmErrorCode::NoCheckpoint,
            Self::Fd(_) | Self::Layers { .. } | Self::Disk { .. } => VmmErrorCode::BadRequest,
            Self::Pause(error) => error.code(),
            Self::Memory(_) | Self::Generation(_) => VmmErrorCode::Memory,
            Self::Kvm(_) => VmmErrorCode::Kvm,
            Self::Devices(error) => device_code(error),
        }
    }
}

impl Code for PauseError {
    fn code(&self) -> VmmErrorCode {
        match self {
            Self::Phase { .. } => VmmErrorCode::WrongPhase,
            Self::Devices(_) => VmmErrorCode::Io,
        }
    }
}
