//! Why a request did not succeed.

use std::io;

use forkd_api::{ErrorBody, ErrorCode};
use thiserror::Error as ThisError;

use crate::InvalidTarget;

/// Why a request did not succeed.
#[derive(Debug, ThisError)]
pub enum Error {
    /// The address cannot be used.
    #[error("the daemon's address cannot be used")]
    Target(#[from] InvalidTarget),
    /// The client could not be set up.
    #[error("the HTTP client cannot be set up")]
    Setup(#[source] reqwest::Error),
    /// There is nothing in what was to be trusted.
    #[error("there is no certificate in what is to be trusted: PEM is needed")]
    NoCertificate,
    /// Nobody answered.
    #[error("no daemon answers at {target}")]
    Unreachable {
        /// Where.
        target: String,
        /// What happened.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The connection ended in the middle.
    #[error("the daemon's answer was cut off")]
    CutOff(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The daemon said no.
    #[error("{}", body.error)]
    Refused {
        /// HTTP status.
        status: u16,
        /// What it said.
        body: ErrorBody,
    },
    /// The answer is not what the API describes.
    #[error("the daemon's answer does not parse (HTTP {status})")]
    BadAnswer {
        /// HTTP status.
        status: u16,
        /// Why not.
        #[source]
        source: serde_json::Error,
    },
}

impl Error {
    /// The innermost cause: what the layers of an HTTP client say above it helps nobody. One of the system keeps its
    /// kind.
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

    /// The daemon may be there, and this user may not speak to it.
    pub fn is_forbidden(&self) -> bool {
        let Self::Unreachable { source, .. } = self else {
            return false;
        };
        source
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    }

    /// What the daemon said, if it answered.
    pub fn body(&self) -> Option<&ErrorBody> {
        match self {
            Self::Refused { body, .. } => Some(body),
            _ => None,
        }
    }

    /// The daemon's code, if it answered.
    pub fn code(&self) -> Option<ErrorCode> {
        self.body().map(|body| body.code)
    }

    /// What to do about it, if the daemon said so.
    pub fn hint(&self) -> Option<&str> {
        self.body().and_then(|body| body.hint.as_deref())
    }
}
