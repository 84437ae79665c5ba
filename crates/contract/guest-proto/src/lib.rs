//! The protocol between the host and the agent in a guest.
//!
//! The two share one byte stream (vsock, TCP or a Unix socket) that carries [frames](frame). Each side
//! opens with a [`Hello`]; after that the host opens *streams* by sending a [`Request`] under a number of
//! its choice, and any number of streams live at once. A stream carries bulk bytes ([`Kind::Data`]) on
//! numbered [channels](channel) in both directions, [`Event`]s towards the host and [`Control`]s towards
//! the agent, and ends with exactly one [`Outcome`], after which its number is free again.
//!
//! ```text
//!   host                                   agent
//!   Hello{version, features} ───────────►
//!                            ◄─────────── Hello{version, features}
//!   Request(7){op: exec}     ───────────►
//!   Data(7, stdin) End(7, stdin) ───────►
//!                            ◄─────────── Event(7){started}
//!                            ◄─────────── Data(7, stdout) Data(7, stderr)
//!   Window(7, stdout)        ───────────►
//!                            ◄─────────── Response(7){ok: …}
//! ```
//!
//! A sender may only have as many bytes under way on a channel as the receiver has granted (see
//! [`window`]), so a slow consumer of one stream holds up neither the others nor the memory of either side.
//! Events count as channel [`channel::EVENTS`].
//!
//! An agent may live in a snapshot for years, so bodies are JSON: fields that a side does not know are
//! ignored, fields that it misses have defaults, and what needs more than that is announced as a feature.

#![cfg_attr(test, allow(clippy::indexing_slicing))]

mod archive;
pub mod channel;
mod control;
mod error;
mod exec;
mod file;
pub mod frame;
mod hello;
mod identity;
mod interp;
mod machine;
mod request;
mod response;
mod service;
pub mod window;

pub use archive::{
    ArchiveResult, MountRequest, MountResult, MountSource, PackItem, PackRequest, UnmountRequest,
    UnpackRequest,
};
pub use control::Control;
pub use error::{AgentError, ErrorCode};
pub use exec::{
    AttachRequest, ExecRequest, ExecResult, ExitStatus, InputRequest, OnDisconnect, OutputPosition,
    ProcessId, ProcessInfo, ProcessState, PtySize, ResourceUsage, Rlimit, RlimitResource,
    SignalRequest, Started,
};
pub use file::{
    Attributes, DialRequest, Entry, FileInfo, FileKind, ListRequest, ListResult, MkdirRequest,
    ReadRequest, ReadResult, RemoveRequest, RenameRequest, SetAttrRequest, StatRequest,
    WatchChange, WatchEvent, WatchRequest, WriteRequest, WriteResult,
};
pub use frame::{DecodeError, Decoder, Frame, Kind, MAX_PAYLOAD};
pub use hello::{Hello, feature};
pub use identity::{HookResult, IdentityReport, IdentityRequest, Reset, ResetReport};
pub use interp::{
    EvalError, EvalMode, EvalRequest, EvalResult, InterpInfo, InterpName, InterpStart, InterpState,
    JsonText, Warmup,
};
pub use machine::{
    ClockRequest, ClockState, CpuMetrics, DiskMetrics, FreezeReport, FreezeRequest,
    HoldVolumeRequest, MemoryMetrics, Metrics, MountVolumeRequest, NetworkRequest, Pong,
    QuiesceReport, QuiesceRequest, ShutdownMode, ShutdownRequest, ThawReport,
};
pub use request::{Request, parse_request};
pub use response::{Event, Outcome};
pub use service::{
    Readiness, Restart, ServiceInfo, ServiceStart, ServiceState, SettleReport, SettleRequest,
};

/// The version both sides name in their hello. Agents and hosts of one version understand each other
/// whatever their features are.
pub const PROTOCOL_VERSION: u32 = 2;

/// The vsock port that the agent listens on inside the guest.
pub const AGENT_PORT: u32 = 1024;

/// The vsock port on the host side that the agent connects to once it is ready.
pub const READY_PORT: u32 = 1;
