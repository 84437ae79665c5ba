//! The REST API as data: requests, responses and routes.
//!
//! These are wire types: names and numbers are unchecked, and the daemon parses them into checked types at
//! its border. Unknown fields are ignored, so that a newer client can talk to an older daemon. Fields marked
//! *(extension)* do not exist in the system whose clients forkd also serves; those clients ignore them.
//!
//! Doc comments in this crate become descriptions in `openapi/v1.json`.

mod branch;
mod builds;
mod checkpoints;
mod error;
mod events;
mod exec;
mod files;
mod hub;
mod images;
mod limits;
mod network;
mod node;
mod ports;
pub mod routes;
mod sandboxes;
mod secrets;
mod snapshots;
mod status;
mod tokens;
mod workspaces;

pub use branch::{BranchMode, BranchRequest};
pub use builds::{BuildEvent, BuildImage};
pub use checkpoints::{
    CheckpointInfo, CheckpointRequest, ForkRequest, RollbackInfo, RollbackRequest,
};
pub use error::{ErrorBody, ErrorCode, Refusal};
pub use events::{EventInfo, EventKind};
pub use exec::{
    EvalRequest, EvalResponse, ExecFrame, ExecRequest, ExecResponse, InterpreterInfo, PingResponse,
    ProcessInfo, ProcessStarted, SignalRequest, StartInterpreter, StartProcess, TerminalInput,
    TerminalSize, TerminalStart,
};
pub use files::{
    AttributesRequest, FileChange, FileChangeKind, FileEntry, FileKind, MakeDirRequest,
    RenameRequest, WriteResult,
};
pub use hub::{MemoryWish, UnpackPlan, UnpackWay};
pub use images::{
    FetchImage, ImageCheck, ImageDetail, ImageInfo, OperationInfo, OperationStatus, PrunedImages,
    PullPolicy, RegistryCredential,
};
pub use limits::{Cpus, InvalidCpus, InvalidLimits, LimitKind, Limits, LimitsRequest};
pub use network::{
    E2bNetwork, FlowEntry, FlowInfo, Inject, InvalidE2bNetwork, InvalidNetwork, NetworkCounters,
    NetworkInfo, NetworkLimits, NetworkPolicy, NetworkRequest, NetworkStatus, UpdateNetwork,
};
pub use node::{FleetNode, LOAD_HEADER, NodeInfo, UpdateNode};
pub use ports::{
    ACCESS_HEADER, MAX_PORTS, PORT_HEADER, PortAccess, PortInfo, PortRequest, PortSettings,
    SANDBOX_HEADER, TCP_PROTOCOL,
};
pub use sandboxes::{CreateSandboxes, SandboxInfo, SandboxState, SandboxStats, UpdateSandbox};
pub use secrets::{PutSecret, SecretInfo};
pub use snapshots::{
    CompactRequest, CreateSnapshot, FsckReport, SnapshotDetail, SnapshotInfo, SnapshotStatus,
    StoreUsage, UpdateSnapshot,
};
pub use status::{DaemonStatus, Health, Isolation, MissingWall, Version};
pub use tokens::{CreateToken, CreatedToken, Role, TokenInfo, UnknownRole};
pub use workspaces::{CreateWorkspace, SuspendRequest, WorkspaceInfo, WorkspaceStatus};

/// Value of `api` in [`Version`].
pub const API_VERSION: &str = "v1";

/// Default address of the daemon.
pub const DEFAULT_URL: &str = "http://127.0.0.1:8889";

/// Upper bound on children per request.
pub const MAX_CHILDREN: u32 = 1000;
