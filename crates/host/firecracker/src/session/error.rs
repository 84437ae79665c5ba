//! Errors of operations, and their codes on the wire.

use std::error::Error;
use std::io;

use forkd_sys::jail::JailError;
use forkd_types::chain;
use forkd_vmm_proto::{FdError, VmmError, VmmErrorCode};
use thiserror::Error;

use crate::api::ApiError;
use crate::disk::FlatDiskError;
use crate::process::StartError;

/// Why a command failed.
#[derive(Debug, Error)]
pub(super) enum OperationError {
    /// The request asks for something that cannot be.
    #[error("{0}")]
    Request(&'static str),
    /// The engine lacks what the request asks for.
    #[error("the engine firecracker lacks {0}")]
    Unsupported(&'static str),
    /// A descriptor is missing.
    #[error(transparent)]
    Fd(#[from] FdError),
    /// The jail cannot be entered.
    #[error("the jail of the VM cannot be entered")]
    Jail(#[from] JailError),
    /// The user of the VM may not open the KVM device.
    #[error(
        "the user of the VM cannot use /dev/kvm: give the device to a group (chgrp kvm /dev/kvm; chmod 660 /dev/kvm)"
    )]
    Kvm(#[source] io::Error),
    /// Firecracker did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// Firecracker failed or refused a request.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// Firecracker refused the kernel.
    #[error("the VM does not boot")]
    Kernel(#[source] ApiError),
    /// Firecracker refused the snapshot.
    #[error("the snapshot is not loaded")]
    Snapshot(#[source] ApiError),
    /// A disk failed.
    #[error(transparent)]
    Disk(#[from] FlatDiskError),
    /// A file of the VM failed.
    #[error("cannot {action}")]
    Io {
        action: &'static str,
        #[source]
        source: io::Error,
    },
}

impl OperationError {
    pub(super) fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }

    /// The error for the wire: a code, and the chain of causes as text.
    pub(super) fn wire(&self) -> VmmError {
        refusal(self.code(), &chain(self))
    }

    fn code(&self) -> VmmErrorCode {
        if is_no_space(self) {
            return VmmErrorCode::NoSpace;
        }
        match self {
            Self::Request(_) | Self::Fd(_) => VmmErrorCode::BadRequest,
            Self::Unsupported(_) => VmmErrorCode::Unsupported,
            Self::Kvm(_) => VmmErrorCode::Kvm,
            Self::Kernel(ApiError::Refused { .. }) => VmmErrorCode::BadKernel,
            Self::Snapshot(ApiError::Refused { .. }) | Self::Disk(FlatDiskError::Layer(_)) => {
                VmmErrorCode::BadSnapshot
            }
            _ => VmmErrorCode::Io,
        }
    }
}

fn is_no_space(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let full = error.downcast_ref::<io::Error>().is_some_and(|error| {
            matches!(
                error.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            )
        });
        if full {
            return true;
        }
        next = error.source();
    }
    false
}

pub(super) fn refusal(code: VmmErrorCode, message: &str) -> VmmError {
    VmmError {
        code,
        message: message.to_owned(),
    }
}

pub(super) fn wrong_phase(message: &str) -> VmmError {
    refusal(VmmErrorCode::WrongPhase, message)
}
