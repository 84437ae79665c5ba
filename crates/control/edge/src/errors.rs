//! Errors as HTTP responses.
//!
//! [`status`] is the only place that maps an error code to an HTTP status. A handler returns a [`Failure`], which
//! becomes an `ErrorBody` with that status.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use forkd_api::{ErrorBody, ErrorCode, Refusal};

tokio::task_local! {
    /// The id of the request that is being served.
    pub static REQUEST_ID: String;
}

/// The status that goes with a code.
pub fn status(code: ErrorCode) -> StatusCode {
    use ErrorCode as C;
    match code {
        C::InvalidRequest
        | C::InvalidName
        | C::PolicyInvalid
        | C::Unsupported
        | C::DockerfileInvalid
        | C::UnsupportedInstruction
        | C::ImageInvalid => StatusCode::BAD_REQUEST,
        C::MissingToken | C::InvalidToken => StatusCode::UNAUTHORIZED,
        C::Forbidden => StatusCode::FORBIDDEN,
        C::NoSuchRoute
        | C::SandboxNotFound
        | C::SnapshotNotFound
        | C::WorkspaceNotFound
        | C::ImageNotFound
        | C::OperationNotFound
        | C::TokenNotFound
        | C::SecretNotFound
        | C::NodeNotFound
        | C::CheckpointNotFound
        | C::ProcessNotFound
        | C::FileNotFound => StatusCode::NOT_FOUND,
        C::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        C::AlreadyExists
        | C::SnapshotNotReady
        | C::SnapshotBroken
        | C::SnapshotIncompatible
        | C::HasDependents
        | C::UntrustedSignature
        | C::ContainsSecrets
        | C::PortInUse
        | C::WrongState => StatusCode::CONFLICT,
        C::SandboxGone => StatusCode::GONE,
        C::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        C::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        C::IdempotencyMismatch | C::InvalidArtifact | C::DigestMismatch | C::StepFailed => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
        C::RateLimited => StatusCode::TOO_MANY_REQUESTS,
        C::AgentFailed | C::PortClosed | C::RegistryDenied | C::RegistryFailed => {
            StatusCode::BAD_GATEWAY
        }
        C::LimitReached
        | C::Busy
        | C::ShuttingDown
        | C::NodeLost
        | C::AgentUnreachable
        | C::NetworkUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        C::Timeout => StatusCode::GATEWAY_TIMEOUT,
        C::NoSpace => StatusCode::INSUFFICIENT_STORAGE,
        C::LaunchFailed | C::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// An error with the status it is answered with.
#[derive(Debug)]
pub struct Failure {
    status: StatusCode,
    body: ErrorBody,
}

/// The result of a handler.
pub type Answer<T> = Result<T, Failure>;

impl Failure {
    /// With the status that goes with the code.
    pub fn new(code: ErrorCode, error: impl Into<String>) -> Self {
        Self {
            status: status(code),
            body: ErrorBody {
                error: error.into(),
                code,
                hint: None,
                request_id: None,
            },
        }
    }

    /// With another status than the usual one.
    #[must_use]
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Adds advice for the user.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.body.hint = Some(hint.into());
        self
    }

    /// The status it is answered with.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    pub fn into_body(self) -> ErrorBody {
        self.body
    }
}

impl<E: Refusal> From<E> for Failure {
    fn from(error: E) -> Self {
        let (code, message) = (error.code(), error.message());
        if matches!(code, ErrorCode::Internal | ErrorCode::LaunchFailed) {
            tracing::error!(code = code.as_str(), error = message, "request failed");
        }
        let mut failure = Self::new(code, message);
        failure.body.hint = error.hint();
        failure
    }
}

impl IntoResponse for Failure {
    fn into_response(mut self) -> Response {
        self.body.request_id = REQUEST_ID.try_with(Clone::clone).ok();
        metrics::counter!("forkd_errors_total", "code" => self.body.code.as_str()).increment(1);
        let retry = matches!(
            self.status,
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
        );
        let unauthorized = self.status == StatusCode::UNAUTHORIZED;
        let mut response = (self.status, Json(self.body)).into_response();
        let headers = response.headers_mut();
        if retry {
            headers.insert("retry-after", axum::http::HeaderValue::from_static("1"));
        }
        if unauthorized {
            headers.insert(
                "www-authenticate",
                axum::http::HeaderValue::from_static("Bearer"),
            );
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_an_error_status() {
        for code in ErrorCode::ALL {
            let status = status(*code);
            assert!(
                status.is_client_error() || status.is_server_error(),
                "{code:?}"
            );
        }
    }
}
