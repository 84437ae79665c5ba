//! Why a request was not carried out.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[error("{message}")]
pub struct AgentError {
    pub code: ErrorCode,
    /// The chain of causes, for people.
    #[serde(default)]
    pub message: String,
    /// The error number, where a system call failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<i32>,
}

impl AgentError {
    /// Without an error number.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            errno: None,
        }
    }
}

/// The kind of an error, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// A field is missing, out of range or contradicts another.
    BadRequest,
    /// The agent does not know this request or option.
    Unsupported,
    /// No such file, process, interpreter or user.
    NotFound,
    /// It is there already.
    Exists,
    /// The system does not allow the operation.
    Permission,
    /// Not a directory where one is needed.
    NotDirectory,
    /// A directory where none may be.
    IsDirectory,
    /// A directory that is not empty.
    NotEmpty,
    /// No space, or a quota is used up.
    NoSpace,
    /// A limit of the agent is reached (streams, processes, sizes).
    Limit,
    /// The program could not be started.
    ExecFailed,
    /// The process or interpreter is gone.
    Gone,
    /// It is in use by another request.
    Busy,
    /// The time given is over.
    Timeout,
    /// The host asked for it.
    Cancelled,
    /// The interpreter died during the call.
    InterpDied,
    /// Any other failed system call.
    Io,
    /// The agent itself failed.
    Internal,
    /// A code that a newer agent made up.
    #[serde(other)]
    Unknown,
}

impl ErrorCode {
    /// The code as it is on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::BadRequest => "bad_request",
            Self::Unsupported => "unsupported",
            Self::NotFound => "not_found",
            Self::Exists => "exists",
            Self::Permission => "permission",
            Self::NotDirectory => "not_directory",
            Self::IsDirectory => "is_directory",
            Self::NotEmpty => "not_empty",
            Self::NoSpace => "no_space",
            Self::Limit => "limit",
            Self::ExecFailed => "exec_failed",
            Self::Gone => "gone",
            Self::Busy => "busy",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::InterpDied => "interp_died",
            Self::Io => "io",
            Self::Internal => "internal",
            Self::Unknown => "unknown",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_of_the_future_is_read() {
        let error: AgentError =
            serde_json::from_str(r#"{"code":"moon_phase","message":"m"}"#).unwrap();
        assert_eq!(error.code, ErrorCode::Unknown);
    }

    #[test]
    fn names_are_what_is_on_the_wire() {
        for code in [
            ErrorCode::BadRequest,
            ErrorCode::InterpDied,
            ErrorCode::NotDirectory,
        ] {
            assert_eq!(
                serde_json::to_string(&code).unwrap(),
                format!("\"{}\"", code.name())
            );
        }
    }
}
