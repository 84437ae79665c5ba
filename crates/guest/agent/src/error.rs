//! Turns failed system calls into errors for the host.

use std::io;
use std::path::Path;

use forkd_guest_proto::{AgentError, ErrorCode};

/// A failed system call, with what was tried.
pub fn io(what: impl std::fmt::Display, error: &io::Error) -> AgentError {
    let code = match error.kind() {
        io::ErrorKind::NotFound => ErrorCode::NotFound,
        io::ErrorKind::AlreadyExists => ErrorCode::Exists,
        io::ErrorKind::PermissionDenied => ErrorCode::Permission,
        io::ErrorKind::NotADirectory => ErrorCode::NotDirectory,
        io::ErrorKind::IsADirectory => ErrorCode::IsDirectory,
        io::ErrorKind::DirectoryNotEmpty => ErrorCode::NotEmpty,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
        // Mount points, other file systems, loops of links, names that are too long: the request is wrong, not the guest.
        io::ErrorKind::InvalidInput
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::ResourceBusy
        | io::ErrorKind::CrossesDevices
        | io::ErrorKind::TooManyLinks => ErrorCode::BadRequest,
        io::ErrorKind::ReadOnlyFilesystem => ErrorCode::Permission,
        _ if error.raw_os_error() == Some(libc::ELOOP) => ErrorCode::BadRequest,
        _ => ErrorCode::Io,
    };
    AgentError {
        code,
        message: format!("{what}: {error}"),
        errno: error.raw_os_error(),
    }
}

/// A failed system call on a path.
pub fn at(what: &str, path: &Path, error: &io::Error) -> AgentError {
    io(format_args!("cannot {what} {}", path.display()), error)
}

/// A field that makes no sense.
pub fn bad(message: impl Into<String>) -> AgentError {
    AgentError::new(ErrorCode::BadRequest, message)
}

/// The connection is gone; this error reaches no reader.
pub fn closed(_: crate::conn::Closed) -> AgentError {
    AgentError::new(ErrorCode::Cancelled, "the connection is gone")
}
