//! Errors of requests.
//!
//! [`Error::Refused`] is an answer of the daemon; every other variant means that no valid answer arrived.

use std::io;

use forkd_api::{ErrorBody, ErrorCode};
use thiserror::Error as ThisError;

use crate::InvalidTarget;

/// Why a request failed.
#[derive(Debug, ThisError)]
pub enum Error {
    /// The address is invalid.
    #[error("the address of the daemon is invalid")]
    Target(#[from] InvalidTarget),
    /// The HTTP client could not be built.
    #[error("the HTTP client cannot be built")]
    Setup(#[source] reqwest::Error),
    /// The file with trusted certificates has no certificate.
    #[error("no certificate to trust found: a PEM file is needed")]
    NoCertificate,
    /// The connection could not be established.
    #[error("no daemon answers at {target}")]
    Unreachable {
        /// Address of the daemon.
        target: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The connection ended before the answer was complete.
    #[error("the connection to the daemon ended before its answer was complete")]
    CutOff(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The daemon answered with an error.
    #[error("{}", body.error)]
    Refused {
        status: u16,
        /// The daemon's explanation.
        body: ErrorBody,
    },
    /// The answer does not have the form that the API describes.
    #[error("the answer of the daemon is invalid (HTTP {status})")]
    BadAnswer {
        status: u16,
        #[source]
        source: serde_json::Error,
    },
}

impl Error {
    /// The innermost cause, since the layers of the HTTP client above it add no information. An I/O error keeps its kind.
    pub(crate) fn root(error: reqwest::Error) -> Box<dyn std::error::Error + Send + Sync> {
        let mut cause: &(dyn std::error::Error + 'static) = &error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        let text = cause.to_string();
        match cause.downcast_ref::<io::Error>() {
            Some(error) => Box::new(io::Error::new(error.kind(), text)),
            None => text.into(),
        }
    }

    /// Whether this user has no permission to connect to the daemon's socket.
    pub fn is_forbidden(&self) -> bool {
        let Self::Unreachable { source, .. } = self else {
            return false;
        };
        source
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    }

    /// The body of a refusal.
    pub fn body(&self) -> Option<&ErrorBody> {
        match self {
            Self::Refused { body, .. } => Some(body),
            _ => None,
        }
    }

    /// The error code of a refusal.
    pub fn code(&self) -> Option<ErrorCode> {
        self.body().map(|body| body.code)
    }

    /// The hint of a refusal.
    pub fn hint(&self) -> Option<&str> {
        self.body().and_then(|body| body.hint.as_deref())
    }
}
