//! The body of every failed request.
//!
//! [`ErrorCode`] is for programs: a code is never renamed and never changes its meaning. The message and the
//! hint are for people.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of every response that is not a success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// Message for people.
    pub error: String,
    /// Code for programs.
    pub code: ErrorCode,
    /// A remedy for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// ID of the request, as in the daemon's log and in the `x-request-id` header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

/// An error that a client can be answered with.
pub trait Refusal {
    /// The reason, for programs.
    fn code(&self) -> ErrorCode;
    /// The reason and its causes, for people.
    fn message(&self) -> String;
    /// A remedy for the user.
    fn hint(&self) -> Option<String>;
}

/// The reason of an error, for programs. A code is never renamed and never changes its meaning.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The body, a query parameter or a field is invalid.
    InvalidRequest,
    /// A name (tag, workspace, sandbox ID) is malformed.
    InvalidName,
    /// The network policy is invalid; the message names the rule.
    PolicyInvalid,
    /// The route does not accept this content type.
    UnsupportedMediaType,
    /// The body exceeds the limit of the route.
    TooLarge,
    /// The route does not exist.
    NoSuchRoute,
    /// The route does not accept this method.
    MethodNotAllowed,
    /// No token was sent.
    MissingToken,
    /// The token is unknown.
    InvalidToken,
    /// The token does not allow the request.
    Forbidden,
    /// The sandbox does not exist.
    SandboxNotFound,
    /// The snapshot does not exist.
    SnapshotNotFound,
    /// The workspace does not exist.
    WorkspaceNotFound,
    /// The image does not exist.
    ImageNotFound,
    /// The container image, its name or its platform cannot be used.
    ImageInvalid,
    /// A registry refuses to give the image.
    RegistryDenied,
    /// A registry cannot be reached, or fails.
    RegistryFailed,
    /// The Dockerfile is malformed; the message names the line.
    DockerfileInvalid,
    /// The Dockerfile has an instruction or option that forkd does not carry out; the message names the line.
    UnsupportedInstruction,
    /// A step of a build failed; the message names the line.
    StepFailed,
    /// The operation does not exist.
    OperationNotFound,
    /// There is no token of that name.
    TokenNotFound,
    /// There is no secret of that name.
    SecretNotFound,
    /// There is no node of that name in the fleet.
    NodeNotFound,
    /// The node of the fleet does not answer; it may come back.
    NodeLost,
    /// There is no checkpoint of that name.
    CheckpointNotFound,
    /// The process does not exist in the sandbox.
    ProcessNotFound,
    /// The file does not exist, on the host or in the guest.
    FileNotFound,
    /// The name is in use.
    AlreadyExists,
    /// The snapshot is still being written.
    SnapshotNotReady,
    /// The snapshot is damaged or incomplete.
    SnapshotBroken,
    /// This host cannot run the snapshot.
    SnapshotIncompatible,
    /// Other snapshots are based on this one.
    HasDependents,
    /// The state of the object does not allow the operation.
    WrongState,
    /// The idempotency key belongs to another request.
    IdempotencyMismatch,
    /// A limit of the daemon is reached; the message names it.
    LimitReached,
    /// Too many requests.
    RateLimited,
    /// The queue of the object is full; retry.
    Busy,
    /// The daemon is about to stop.
    ShuttingDown,
    /// The agent in the guest does not answer.
    AgentUnreachable,
    /// The agent in the guest refused or failed.
    AgentFailed,
    /// Nothing listens on the port of the guest, or its server hung up.
    PortClosed,
    /// The host address on which a port is to be published is in use or cannot be bound.
    PortInUse,
    /// The network engine is missing or does not answer.
    NetworkUnavailable,
    /// An operation exceeded its timeout.
    Timeout,
    /// The VM ended.
    SandboxGone,
    /// The VM could not be started.
    LaunchFailed,
    /// The artifact of a snapshot is malformed, incomplete or too large.
    InvalidArtifact,
    /// Content does not match the digest that names it.
    DigestMismatch,
    /// The artifact is not signed, or its signer is not trusted.
    UntrustedSignature,
    /// The snapshot holds keys or tokens.
    ContainsSecrets,
    /// The disk is full.
    NoSpace,
    /// Not possible with this configuration or build.
    Unsupported,
    /// The daemon failed; its log has more.
    Internal,
}

impl ErrorCode {
    /// Every code, in the order of the documentation.
    pub const ALL: &[Self] = &[
        Self::InvalidRequest,
        Self::InvalidName,
        Self::PolicyInvalid,
        Self::UnsupportedMediaType,
        Self::TooLarge,
        Self::NoSuchRoute,
        Self::MethodNotAllowed,
        Self::MissingToken,
        Self::InvalidToken,
        Self::Forbidden,
        Self::SandboxNotFound,
        Self::SnapshotNotFound,
        Self::WorkspaceNotFound,
        Self::ImageNotFound,
        Self::ImageInvalid,
        Self::RegistryDenied,
        Self::RegistryFailed,
        Self::DockerfileInvalid,
        Self::UnsupportedInstruction,
        Self::StepFailed,
        Self::OperationNotFound,
        Self::TokenNotFound,
        Self::SecretNotFound,
        Self::NodeNotFound,
        Self::NodeLost,
        Self::CheckpointNotFound,
        Self::ProcessNotFound,
        Self::FileNotFound,
        Self::AlreadyExists,
        Self::SnapshotNotReady,
        Self::SnapshotBroken,
        Self::SnapshotIncompatible,
        Self::HasDependents,
        Self::WrongState,
        Self::IdempotencyMismatch,
        Self::LimitReached,
        Self::RateLimited,
        Self::Busy,
        Self::ShuttingDown,
        Self::AgentUnreachable,
        Self::AgentFailed,
        Self::PortClosed,
        Self::PortInUse,
        Self::NetworkUnavailable,
        Self::Timeout,
        Self::SandboxGone,
        Self::LaunchFailed,
        Self::InvalidArtifact,
        Self::DigestMismatch,
        Self::UntrustedSignature,
        Self::ContainsSecrets,
        Self::NoSpace,
        Self::Unsupported,
        Self::Internal,
    ];

    /// The code as in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::InvalidName => "invalid_name",
            Self::PolicyInvalid => "policy_invalid",
            Self::UnsupportedMediaType => "unsupported_media_type",
            Self::TooLarge => "too_large",
            Self::NoSuchRoute => "no_such_route",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::MissingToken => "missing_token",
            Self::InvalidToken => "invalid_token",
            Self::Forbidden => "forbidden",
            Self::SandboxNotFound => "sandbox_not_found",
            Self::SnapshotNotFound => "snapshot_not_found",
            Self::WorkspaceNotFound => "workspace_not_found",
            Self::ImageNotFound => "image_not_found",
            Self::ImageInvalid => "image_invalid",
            Self::RegistryDenied => "registry_denied",
            Self::RegistryFailed => "registry_failed",
            Self::DockerfileInvalid => "dockerfile_invalid",
            Self::UnsupportedInstruction => "unsupported_instruction",
            Self::StepFailed => "step_failed",
            Self::OperationNotFound => "operation_not_found",
            Self::TokenNotFound => "token_not_found",
            Self::SecretNotFound => "secret_not_found",
            Self::NodeNotFound => "node_not_found",
            Self::NodeLost => "node_lost",
            Self::CheckpointNotFound => "checkpoint_not_found",
            Self::ProcessNotFound => "process_not_found",
            Self::FileNotFound => "file_not_found",
            Self::AlreadyExists => "already_exists",
            Self::SnapshotNotReady => "snapshot_not_ready",
            Self::SnapshotBroken => "snapshot_broken",
            Self::SnapshotIncompatible => "snapshot_incompatible",
            Self::HasDependents => "has_dependents",
            Self::WrongState => "wrong_state",
            Self::IdempotencyMismatch => "idempotency_mismatch",
            Self::LimitReached => "limit_reached",
            Self::RateLimited => "rate_limited",
            Self::Busy => "busy",
            Self::ShuttingDown => "shutting_down",
            Self::AgentUnreachable => "agent_unreachable",
            Self::AgentFailed => "agent_failed",
            Self::PortClosed => "port_closed",
            Self::PortInUse => "port_in_use",
            Self::NetworkUnavailable => "network_unavailable",
            Self::Timeout => "timeout",
            Self::SandboxGone => "sandbox_gone",
            Self::LaunchFailed => "launch_failed",
            Self::InvalidArtifact => "invalid_artifact",
            Self::DigestMismatch => "digest_mismatch",
            Self::UntrustedSignature => "untrusted_signature",
            Self::ContainsSecrets => "contains_secrets",
            Self::NoSpace => "no_space",
            Self::Unsupported => "unsupported",
            Self::Internal => "internal",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_written_code_is_the_serialised_one() {
        for code in ErrorCode::ALL {
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
        }
    }

    #[test]
    fn a_body_without_extras_is_two_fields() {
        let body = ErrorBody {
            error: "no".into(),
            code: ErrorCode::Busy,
            hint: None,
            request_id: None,
        };
        assert_eq!(
            serde_json::to_string(&body).unwrap(),
            r#"{"error":"no","code":"busy"}"#
        );
    }
}
