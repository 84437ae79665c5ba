"""Python client of forkd: microVMs that start copy-on-write from a warm parent.

    from forkd_sdk import Sandbox

    with Sandbox.create("py") as sandbox:
        print(sandbox.commands.run("uname -a").stdout)

Every class has an asynchronous twin whose name begins with `Async`.
"""

from forkd_sdk._async.client import AsyncClient
from forkd_sdk._async.commands import AsyncProcess
from forkd_sdk._async.session import AsyncSession
from forkd_sdk._sync.client import Client
from forkd_sdk._sync.commands import Process
from forkd_sdk._sync.session import Session
from forkd_sdk._tree import Node
from forkd_sdk.controller import Controller
from forkd_sdk.errors import (
    AgentFailed,
    AlreadyExists,
    ApiError,
    AuthError,
    Busy,
    CheckpointNotFound,
    CommandFailed,
    CommandTimeout,
    ConnectionFailed,
    ControllerError,
    EvalError,
    ExploreError,
    FileMissing,
    ForkdError,
    ForkError,
    IdempotencyMismatch,
    InvalidAddress,
    InvalidRequest,
    LaunchFailed,
    LimitReached,
    NoSpace,
    NotFound,
    OperationTimeout,
    ProcessNotFound,
    ProtocolError,
    RequestTimeout,
    SandboxGone,
    SandboxNotFound,
    SandboxUnreachable,
    SnapshotNotFound,
    StreamCut,
    Unsupported,
    WrongState,
)
from forkd_sdk.models import (
    BranchMode,
    Checkpoint,
    CommandResult,
    Evaluation,
    Event,
    Exited,
    Exploration,
    FileChange,
    FileEntry,
    Outcome,
    Output,
    Ping,
    ProcessInfo,
    Rollback,
    SandboxInfo,
    SandboxStats,
    SnapshotInfo,
    Started,
    Transfer,
    Workspace,
)
from forkd_sdk.sandbox import AsyncSandbox, Sandbox

__version__ = "0.1.0"

__all__ = [
    "AgentFailed",
    "AlreadyExists",
    "ApiError",
    "AsyncClient",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSession",
    "AuthError",
    "BranchMode",
    "Busy",
    "Checkpoint",
    "CheckpointNotFound",
    "Client",
    "CommandFailed",
    "CommandResult",
    "CommandTimeout",
    "ConnectionFailed",
    "Controller",
    "ControllerError",
    "EvalError",
    "Evaluation",
    "Event",
    "Exited",
    "Exploration",
    "ExploreError",
    "FileChange",
    "FileEntry",
    "FileMissing",
    "ForkError",
    "ForkdError",
    "IdempotencyMismatch",
    "InvalidAddress",
    "InvalidRequest",
    "LaunchFailed",
    "LimitReached",
    "NoSpace",
    "Node",
    "NotFound",
    "OperationTimeout",
    "Outcome",
    "Output",
    "Ping",
    "Process",
    "ProcessInfo",
    "ProcessNotFound",
    "ProtocolError",
    "RequestTimeout",
    "Rollback",
    "Sandbox",
    "SandboxGone",
    "SandboxInfo",
    "SandboxNotFound",
    "SandboxStats",
    "SandboxUnreachable",
    "Session",
    "SnapshotInfo",
    "SnapshotNotFound",
    "Started",
    "StreamCut",
    "Transfer",
    "Unsupported",
    "Workspace",
    "WrongState",
]
