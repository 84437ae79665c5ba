//! The error of every operation on sandboxes and snapshots.
//!
//! [`Error`] has one variant for each part that can fail, with the cause in `source()`. [`Error::code`] is the one
//! place that maps a failure to the code that clients see; [`Error::hint`] adds advice.

use std::io;
use std::path::PathBuf;

use forkd_agent_client::Error as ClientError;
use forkd_api::{ErrorCode, InvalidNetwork};
use forkd_hub::{HubError, Kind};
use forkd_store::StoreError;
pub use forkd_types::chain;
use forkd_types::{SandboxId, Tag};
use forkd_vmm_link::{BrokerCallError, NetEngineError, SpawnerError, VmmCallError};

use crate::seal::SealError;
use forkd_vmm_proto::spawn::SpawnError;
use forkd_vmm_proto::{MAX_FDS, TooManyFds, VmmErrorCode};
use thiserror::Error;

use crate::state::DbError;

/// Why an operation was not carried out.
#[derive(Debug, Error)]
pub enum Error {
    /// The request cannot be carried out as it is, and the message says all there is to say.
    #[error("{message}")]
    Refused {
        code: ErrorCode,
        message: String,
        /// Advice for the user.
        hint: Option<String>,
    },
    /// No sandbox of that id lives.
    #[error("there is no sandbox {id}")]
    NoSandbox { id: SandboxId },
    /// The snapshot is still being written.
    #[error("snapshot {tag} is still being written")]
    StillWriting { tag: Tag },
    /// The store said no.
    #[error("{action}")]
    Store {
        /// The failed step, as the message of this error.
        action: String,
        #[source]
        source: StoreError,
    },
    /// An artifact cannot be written, read or trusted.
    #[error("{action}")]
    Hub {
        /// The failed step, as the message of this error.
        action: String,
        #[source]
        source: HubError,
    },
    /// No VMM process could be had.
    #[error("no microVM process could be started")]
    Spawner(#[from] SpawnerError),
    /// The network engine failed or refused.
    #[error("the network engine cannot serve the sandbox")]
    Network(#[from] NetEngineError),
    /// The broker of secrets failed or refused.
    #[error("the broker of secrets cannot serve the sandbox")]
    Broker(#[from] BrokerCallError),
    /// A stored secret cannot be read or written.
    #[error("the stored secrets cannot be used")]
    Seal(#[from] SealError),
    /// The policy of a request is invalid.
    #[error("the network policy is invalid")]
    Policy(#[from] InvalidNetwork),
    /// The VMM said no.
    #[error("{action}")]
    Vmm {
        /// The failed step, as the message of this error.
        action: &'static str,
        #[source]
        source: VmmCallError,
    },
    /// The agent said no, or nothing.
    #[error("{action}")]
    Agent {
        /// The failed step, as the message of this error.
        action: String,
        #[source]
        source: ClientError,
    },
    /// Something took too long.
    #[error("{what} took longer than {seconds} s")]
    Timeout {
        /// The step that took too long.
        what: String,
        /// How long it may take.
        seconds: u64,
    },
    /// The VM ended.
    #[error("sandbox {id} has ended: {how}")]
    Gone {
        id: SandboxId,
        /// How the VM ended.
        how: String,
    },
    /// The database failed.
    #[error("the state database failed")]
    Db(#[from] DbError),
    /// A file or socket failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The verb of the message, such as "open".
        action: &'static str,
        /// With which path.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A task of ours was lost.
    #[error("an internal task ended early")]
    Task,
}

impl From<TooManyFds> for Error {
    fn from(error: TooManyFds) -> Self {
        Self::hinted(
            ErrorCode::LimitReached,
            format!(
                "the snapshot has {} layers and other files, {MAX_FDS} is the limit",
                error.count
            ),
            "compact the snapshot first: POST /v1/snapshots/{tag}/compact",
        )
    }
}

impl Error {
    /// A refusal without a hint.
    pub fn refused(code: ErrorCode, message: impl Into<String>) -> Self {
        Self::Refused {
            code,
            message: message.into(),
            hint: None,
        }
    }

    /// A refusal with a hint.
    pub fn hinted(code: ErrorCode, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Refused {
            code,
            message: message.into(),
            hint: Some(hint.into()),
        }
    }

    /// Puts what was tried to what the store said.
    pub fn store(action: impl Into<String>) -> impl FnOnce(StoreError) -> Self {
        let action = action.into();
        move |source| Self::Store { action, source }
    }

    /// Puts what was tried to the error of an artifact.
    pub fn hub(action: impl Into<String>) -> impl FnOnce(HubError) -> Self {
        let action = action.into();
        move |source| Self::Hub { action, source }
    }

    /// Puts what was tried to what the VMM said.
    pub fn vmm(action: &'static str) -> impl FnOnce(VmmCallError) -> Self {
        move |source| Self::Vmm { action, source }
    }

    /// Puts what was tried to what the agent said.
    pub fn agent(action: impl Into<String>) -> impl FnOnce(ClientError) -> Self {
        let action = action.into();
        move |source| Self::Agent { action, source }
    }

    /// Puts what was tried to what the system said.
    pub fn io<E: Into<io::Error>>(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(E) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source: source.into(),
        }
    }

    /// The VMM refused a command. Any other failure of a call leaves open how far the VMM came.
    pub fn is_vmm_refusal(&self) -> bool {
        matches!(
            self,
            Self::Vmm {
                source: VmmCallError::Refused(_),
                ..
            }
        )
    }

    /// The error code that clients act on.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Refused { code, .. } => *code,
            Self::NoSandbox { .. } => ErrorCode::SandboxNotFound,
            Self::StillWriting { .. } => ErrorCode::SnapshotNotReady,
            Self::Store { source, .. } => store_code(source),
            Self::Hub { source, .. } => hub_code(source),
            Self::Spawner(source) => spawner_code(source),
            Self::Vmm { source, .. } => vmm_code(source),
            Self::Agent { source, .. } => agent_code(source),
            Self::Network(_) | Self::Broker(_) => ErrorCode::NetworkUnavailable,
            Self::Policy(_) => ErrorCode::PolicyInvalid,
            Self::Timeout { .. } => ErrorCode::Timeout,
            Self::Gone { .. } => ErrorCode::SandboxGone,
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                ErrorCode::NoSpace
            }
            Self::Db(_) | Self::Io { .. } | Self::Seal(_) | Self::Task => ErrorCode::Internal,
        }
    }

    /// Advice for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Refused { hint, .. } => hint.clone(),
            Self::NoSandbox { .. } => {
                Some("GET /v1/sandboxes (forkd ls) lists those that live".into())
            }
            Self::StillWriting { .. } => {
                Some("wait until GET /v1/snapshots (forkd images) shows it as ready".into())
            }
            Self::Store { source, .. } => store_hint(source),
            Self::Hub { source, .. } => source.hint(),
            Self::Agent { .. } if self.code() == ErrorCode::AgentUnreachable => {
                Some("the console may say why: GET /v1/sandboxes/{id}/logs (forkd logs ID)".into())
            }
            Self::Network(_) => {
                Some("the daemon starts forkd-net again; `forkd doctor` says why it does not answer".into())
            }
            Self::Broker(_) => {
                Some("the daemon starts forkd-broker again; its log says why it does not answer".into())
            }
            Self::Policy(_) => {
                Some("a rule is \"allow HOST:PORT\" or \"deny HOST:PORT\"; HOST is a name, *.name, an address, a range or one of public, private, host, metadata, reserved".into())
            }
            _ => None,
        }
    }

    /// The message and its causes in one line.
    pub fn chain(&self) -> String {
        match self {
            // Its code says nothing that the message does not.
            Self::Agent {
                action,
                source: ClientError::Agent(refused),
            } => format!("{action}: {}", refused.message),
            error => chain(error),
        }
    }
}

impl forkd_api::Refusal for Error {
    fn code(&self) -> ErrorCode {
        Self::code(self)
    }

    fn message(&self) -> String {
        self.chain()
    }

    fn hint(&self) -> Option<String> {
        Self::hint(self)
    }
}

fn store_code(error: &StoreError) -> ErrorCode {
    match error {
        StoreError::NotFound { .. } => ErrorCode::SnapshotNotFound,
        StoreError::Exists { .. } => ErrorCode::AlreadyExists,
        StoreError::HasDependents { .. } => ErrorCode::HasDependents,
        StoreError::Manifest { .. } | StoreError::Blob { .. } | StoreError::Damaged { .. } => {
            ErrorCode::SnapshotBroken
        }
        StoreError::ChainTooLong { .. } | StoreError::Limit { .. } => ErrorCode::LimitReached,
        StoreError::NoImage { .. } => ErrorCode::ImageNotFound,
        error if error.is_no_space() => ErrorCode::NoSpace,
        StoreError::Path(_) | StoreError::InUse { .. } | StoreError::Format { .. } => {
            ErrorCode::Internal
        }
    }
}

fn store_hint(error: &StoreError) -> Option<String> {
    Some(match error {
        StoreError::NotFound { .. } => {
            "GET /v1/snapshots (forkd images) lists what there is".into()
        }
        StoreError::HasDependents { .. } => {
            "delete with cascade=true (--cascade) to remove them too, or force=true (--force) to leave them".into()
        }
        StoreError::Blob { .. } | StoreError::Damaged { .. } => {
            "POST /v1/store/fsck says what is damaged; delete the snapshot and build it again"
                .into()
        }
        StoreError::Manifest { .. } => {
            "delete the snapshot (forkd rmi TAG) and build or branch it again".into()
        }
        StoreError::Limit { .. } => {
            "delete snapshots (forkd rmi), or start the daemon with a higher --store-limit-mib".into()
        }
        StoreError::NoImage { .. } => "GET /v1/images lists what is installed".into(),
        StoreError::Exists { .. } => "choose another tag, or delete that one first".into(),
        _ => return None,
    })
}

fn hub_code(error: &HubError) -> ErrorCode {
    match error.kind() {
        Kind::Invalid => ErrorCode::InvalidArtifact,
        Kind::Digest => ErrorCode::DigestMismatch,
        Kind::Untrusted => ErrorCode::UntrustedSignature,
        Kind::Incompatible => ErrorCode::SnapshotIncompatible,
        Kind::Secrets => ErrorCode::ContainsSecrets,
        Kind::NotFound => ErrorCode::SnapshotNotFound,
        Kind::NoSpace => ErrorCode::NoSpace,
        // A stream that breaks off is the client's, and so is a request that it gave up.
        Kind::Cancelled => ErrorCode::InvalidRequest,
        Kind::Io if matches!(error, HubError::Stream(_)) => ErrorCode::InvalidRequest,
        Kind::Io => ErrorCode::Internal,
    }
}

fn spawner_code(error: &SpawnerError) -> ErrorCode {
    match error {
        SpawnerError::Refused(SpawnError::OtherEngine { .. }) => ErrorCode::SnapshotIncompatible,
        SpawnerError::Refused(SpawnError::NoWall { .. }) => ErrorCode::Unsupported,
        SpawnerError::Refused(SpawnError::OutOfRange { .. }) => ErrorCode::InvalidRequest,
        _ => ErrorCode::LaunchFailed,
    }
}

fn vmm_code(error: &VmmCallError) -> ErrorCode {
    match error {
        VmmCallError::Link(_) => ErrorCode::SandboxGone,
        VmmCallError::Unexpected { .. } => ErrorCode::Internal,
        VmmCallError::Refused(refused) => match refused.code {
            VmmErrorCode::WrongPhase => ErrorCode::WrongState,
            VmmErrorCode::BadSnapshot => ErrorCode::SnapshotBroken,
            VmmErrorCode::Incompatible => ErrorCode::SnapshotIncompatible,
            VmmErrorCode::NoSpace => ErrorCode::NoSpace,
            VmmErrorCode::NoCheckpoint => ErrorCode::CheckpointNotFound,
            VmmErrorCode::TooMany => ErrorCode::LimitReached,
            VmmErrorCode::Unsupported => ErrorCode::Unsupported,
            VmmErrorCode::BadKernel => ErrorCode::InvalidRequest,
            _ => ErrorCode::LaunchFailed,
        },
    }
}

fn agent_code(error: &ClientError) -> ErrorCode {
    use forkd_guest_proto::ErrorCode as Agent;
    match error {
        ClientError::Agent(refused) => match refused.code {
            Agent::NotFound => ErrorCode::FileNotFound,
            Agent::BadRequest
            | Agent::Exists
            | Agent::Permission
            | Agent::NotDirectory
            | Agent::IsDirectory
            | Agent::NotEmpty
            | Agent::ExecFailed => ErrorCode::InvalidRequest,
            Agent::Gone => ErrorCode::ProcessNotFound,
            Agent::Limit => ErrorCode::LimitReached,
            Agent::Timeout => ErrorCode::Timeout,
            Agent::Unsupported => ErrorCode::Unsupported,
            Agent::Busy => ErrorCode::Busy,
            _ => ErrorCode::AgentFailed,
        },
        ClientError::Timeout => ErrorCode::Timeout,
        ClientError::OverBudget { .. } => ErrorCode::Busy,
        _ => ErrorCode::AgentUnreachable,
    }
}
