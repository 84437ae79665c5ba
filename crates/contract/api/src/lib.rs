//! The REST API as data: what is sent, what comes back, and where.
//!
//! These are wire types. Names and numbers in them are as they came; the daemon parses them into
//! checked types at its border. Unknown fields are ignored, so that a newer client can talk to an older
//! daemon. Fields marked *(extension)* do not exist in the system whose clients we also serve; its
//! clients ignore them.

mod branch;
mod checkpoints;
mod error;
mod events;
mod exec;
mod files;
mod limits;
pub mod routes;
mod sandboxes;
mod snapshots;
mod status;
mod tokens;
mod workspaces;

pub use branch::{BranchMode, BranchRequest};
pub use checkpoints::{
    CheckpointInfo, CheckpointRequest, ForkRequest, RollbackInfo, RollbackRequest,
};
pub use error::{ErrorBody, ErrorCode, Refusal};
pub use events::{EventInfo, EventKind};
pub use exec::{
    EvalRequest, EvalResponse, ExecFrame, ExecRequest, ExecResponse, PingResponse, ProcessInfo,
    ProcessStarted, SignalRequest, TerminalInput, TerminalStart,
};
pub use files::{FileChange, FileChangeKind, FileEntry, FileKind, MakeDirRequest, WriteResult};
pub use limits::{Cpus, InvalidCpus, InvalidLimits, LimitKind, Limits, LimitsRequest};
pub use sandboxes::{CreateSandboxes, SandboxInfo, SandboxState, SandboxStats, UpdateSandbox};
pub use snapshots::{
    CompactRequest, CreateSnapshot, FsckReport, SnapshotDetail, SnapshotInfo, SnapshotStatus,
    StoreUsage, UpdateSnapshot,
};
pub use status::{Health, ImageInfo, Version};
pub use tokens::{CreateToken, CreatedToken, Role, TokenInfo, UnknownRole};
pub use workspaces::{CreateWorkspace, SuspendRequest, WorkspaceInfo, WorkspaceStatus};

/// The value of `api` in [`Version`].
pub const API_VERSION: &str = "v1";

/// Where the daemon listens when nothing else is said.
pub const DEFAULT_URL: &str = "http://127.0.0.1:8889";

/// The most children one request may ask for.
pub const MAX_CHILDREN: u32 = 1000;
