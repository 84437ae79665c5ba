//! Refusals in the form that the E2B SDKs read: `{"code": STATUS, "message": TEXT}`.
//!
//! The SDKs decide by both numbers, so the code in the body is always the status of the response.

use axum::Json;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use forkd_api::ErrorCode;
use forkd_edge::errors::Failure;
use forkd_sandboxes::error::Error;
use serde_json::json;

/// A refusal of the E2B plane.
#[derive(Debug)]
pub struct Refusal {
    pub status: StatusCode,
    pub message: String,
    /// The client may send the same request again.
    pub again: bool,
    /// The sandbox that cannot be reached; the SDKs look for it in answers of the proxy.
    pub sandbox: Option<String>,
}

/// The result of a handler.
pub type Answer<T> = Result<T, Refusal>;

impl Refusal {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            again: false,
            sandbox: None,
        }
    }

    /// The request is not valid.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// No sandbox of that ID exists for the caller.
    pub fn no_sandbox(id: &str) -> Self {
        let id: String = id.chars().take(80).collect();
        Self::new(StatusCode::NOT_FOUND, format!("sandbox {id} was not found"))
    }

    /// The sandbox of a data request is gone or paused. The SDKs know this text.
    pub fn not_running(id: &str) -> Self {
        Self {
            sandbox: Some(id.chars().take(80).collect()),
            ..Self::new(StatusCode::BAD_GATEWAY, "The sandbox was not found")
        }
    }

    /// Nothing listens on the port of a running sandbox. The SDKs know this text.
    pub fn port_closed(id: &str) -> Self {
        Self {
            sandbox: Some(id.to_owned()),
            ..Self::new(
                StatusCode::BAD_GATEWAY,
                "The sandbox is running but port is not open",
            )
        }
    }
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        let status = failure.status();
        let body = failure.into_body();
        let status = match body.code {
            ErrorCode::SandboxGone => StatusCode::NOT_FOUND,
            _ => status,
        };
        let message = match body.hint {
            Some(hint) => format!("{} ({hint})", body.error),
            None => body.error,
        };
        Self {
            again: matches!(body.code, ErrorCode::RateLimited | ErrorCode::Busy),
            ..Self::new(status, message)
        }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Failure::from(error).into()
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut body = json!({"code": self.status.as_u16(), "message": self.message});
        if let (Some(sandbox), Some(body)) = (self.sandbox, body.as_object_mut()) {
            body.insert("sandboxId".into(), sandbox.into());
        }
        let mut response = (self.status, Json(body)).into_response();
        // The Python SDK sends a request three times more unless it is told not to.
        if matches!(
            self.status,
            StatusCode::TOO_MANY_REQUESTS
                | StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT
        ) {
            let again = if self.again { "true" } else { "false" };
            let headers = response.headers_mut();
            headers.insert("should-retry", HeaderValue::from_static(again));
            if self.again {
                headers.insert("retry-after", HeaderValue::from_static("1"));
            }
        }
        response
    }
}
