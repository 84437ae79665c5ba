"""Results of the client. All are immutable; times are in seconds since 1970 unless the name says otherwise."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from forkd_sdk._wire import Fields
from forkd_sdk.errors import ApiError, ProtocolError, api_error

BranchMode = Literal["full", "diff", "live"]
# Who may use a port by its host name.
PortAccess = Literal["owner", "token", "public"]
# A mode ("none", "public", "open", "custom"), or a policy: {"mode": …, "rules": […], "limits": {…}}.
Network = str | dict[str, Any]
R = TypeVar("R")
O = TypeVar("O")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """The record of a sandbox. `raw` has every field of the daemon's answer."""

    id: str
    snapshot_tag: str
    state: str
    created_at: int
    expires_at: int | None
    memory_mib: int | None
    memory_limit_mib: int | None
    vcpus: int | None
    hostname: str | None
    workspace: str | None
    ready_us: int | None
    labels: dict[str, str]
    error: ApiError | None
    raw: dict[str, Any] = field(repr=False)

    @staticmethod
    def read(value: object) -> SandboxInfo:
        f = Fields(value, "sandbox")
        error = f.raw("error")
        return SandboxInfo(
            id=f.text("id"),
            snapshot_tag=f.text("snapshot_tag"),
            state=f.opt_text("state") or "running",
            created_at=f.number("created_at_unix"),
            expires_at=f.opt_number("expires_at_unix"),
            memory_mib=f.opt_number("memory_mib"),
            memory_limit_mib=f.opt_number("memory_limit_mib"),
            vcpus=f.opt_number("vcpus"),
            hostname=f.opt_text("hostname"),
            workspace=f.opt_text("workspace"),
            ready_us=f.opt_number("ready_us"),
            labels=f.labels(),
            error=None if error is None else api_error(500, error, "sandbox"),
            raw=f.fields,
        )


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A snapshot. `raw` has every field of the daemon's answer."""

    tag: str
    status: str | None
    created_at: int | None
    parent_tag: str | None
    branched_from: str | None
    memory_mib: int | None
    vcpus: int | None
    image: str | None
    pause_us: int | None
    physical_bytes: int | None
    warning: str | None
    raw: dict[str, Any] = field(repr=False)

    @staticmethod
    def read(value: object) -> SnapshotInfo:
        f = Fields(value, "snapshot")
        return SnapshotInfo(
            tag=f.text("tag"),
            status=f.opt_text("status"),
            created_at=f.opt_number("created_at_unix"),
            parent_tag=f.opt_text("parent_tag"),
            branched_from=f.opt_text("branched_from"),
            memory_mib=f.opt_number("memory_mib"),
            vcpus=f.opt_number("vcpus"),
            image=f.opt_text("image"),
            pause_us=f.opt_number("pause_us"),
            physical_bytes=f.opt_number("physical_bytes"),
            warning=f.opt_text("warning"),
            raw=f.fields,
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state inside a sandbox that it can return to."""

    name: str
    created_at: int
    pause_us: int
    bytes: int
    unchanged: bool

    @staticmethod
    def read(value: object) -> Checkpoint:
        f = Fields(value, "checkpoint")
        return Checkpoint(f.text("name"), f.number("created_at_unix"), f.number("pause_us"), f.number("bytes"), f.flag("unchanged"))


@dataclass(frozen=True, slots=True)
class Rollback:
    """A completed roll-back. `pause_us` is the time without a running vCPU."""

    to: str
    pause_us: int
    pages: int
    ready_us: int

    @staticmethod
    def read(value: object) -> Rollback:
        f = Fields(value, "rollback")
        return Rollback(f.text("to"), f.number("pause_us"), f.number("pages"), f.number("ready_us"))


@dataclass(frozen=True, slots=True)
class Workspace:
    """A sandbox with a name that can be suspended to disk."""

    name: str
    status: str
    source_snapshot_tag: str
    current_state_tag: str | None
    live_sandbox_id: str | None

    @staticmethod
    def read(value: object) -> Workspace:
        f = Fields(value, "workspace")
        return Workspace(
            f.text("name"),
            f.text("status"),
            f.text("source_snapshot_tag"),
            f.opt_text("current_state_tag"),
            f.opt_text("live_sandbox_id"),
        )


@dataclass(frozen=True, slots=True)
class SandboxStats:
    """The use of the host by one sandbox."""

    id: str
    state: str
    memory_mib: int
    own_bytes: int
    shared_bytes: int
    cpu_us: int

    @staticmethod
    def read(value: object) -> SandboxStats:
        f = Fields(value, "stats")
        return SandboxStats(
            f.text("id"), f.text("state"), f.number("memory_mib"), f.number("own_bytes"), f.number("shared_bytes"), f.number("cpu_us")
        )


@dataclass(frozen=True, slots=True)
class Ping:
    """The answer of the agent in the guest."""

    pong: bool
    agent_version: str | None
    warmup_ready: bool
    rtt_us: int | None
    raw: dict[str, Any] = field(repr=False)

    @staticmethod
    def read(value: object) -> Ping:
        f = Fields(value, "ping")
        return Ping(f.flag("pong"), f.opt_text("agent_version"), f.flag("warmup_ready"), f.opt_number("rtt_us"), f.fields)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The end of a command. A negative exit code is the number of the signal that ended it."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Whether the exit code is zero."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Started:
    """The process runs."""

    pid: int


@dataclass(frozen=True, slots=True)
class Output:
    """Data on one stream of a process."""

    stream: Literal["stdout", "stderr"]
    data: bytes

    @property
    def text(self) -> str:
        """The data as text; bytes that are not UTF-8 are replaced."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Exited:
    """The process ended; the last frame of its stream."""

    exit_code: int
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Nothing happened, and the connection is alive."""


Frame = Started | Output | Exited | Keepalive


def read_frame(value: object) -> Frame | None:
    """A frame of a process. A frame type of a newer daemon is None; an error frame is raised as its `ApiError`."""
    f = Fields(value, "frame")
    kind = f.text("type")
    if kind == "started":
        return Started(f.number("pid"))
    if kind == "stdout":
        return Output("stdout", _data(f))
    if kind == "stderr":
        return Output("stderr", _data(f))
    if kind == "exit":
        return Exited(f.number("exit_code"), f.flag("timed_out"))
    if kind == "error":
        raise api_error(500, value, "stream")
    return Keepalive() if kind == "keepalive" else None


def _data(f: Fields) -> bytes:
    text = f.opt_text("text")
    if text is not None:
        return text.encode()
    try:
        return base64.b64decode(f.text("base64"), validate=True)
    except binascii.Error as error:
        raise ProtocolError("frame: the data is not base64") from error


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that was started through the API."""

    pid: int
    args: tuple[str, ...]
    running: bool
    exit_code: int | None

    @staticmethod
    def read(value: object) -> ProcessInfo:
        f = Fields(value, "process")
        return ProcessInfo(f.number("pid"), f.texts("args"), f.flag("running"), f.opt_number("exit_code"))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of code in the warm interpreter.

    `value` is the result if the interpreter could convert it to JSON, otherwise its printed form; `text` is always the
    printed form.
    """

    value: Any
    text: str | None
    stdout: str
    stderr: str
    error: str | None
    traceback: str | None

    @staticmethod
    def read(value: object) -> Evaluation:
        f = Fields(value, "eval")
        text, as_json = f.opt_text("result"), f.opt_text("result_json")
        result: Any = text
        if as_json is not None:
            try:
                result = json.loads(as_json)
            except ValueError as error:
                raise ProtocolError("eval: result_json is not JSON") from error
        return Evaluation(
            result, text, f.opt_text("stdout") or "", f.opt_text("stderr") or "", f.opt_text("error"), f.opt_text("traceback")
        )


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file or directory in the guest."""

    name: str
    path: str
    kind: str
    size: int
    mode: int
    modified: int
    target: str | None = None
    """Where a symbolic link points."""

    @staticmethod
    def read(value: object, folder: str | None) -> FileEntry:
        """An entry of a directory, or a path that was asked for alone."""
        f = Fields(value, "file")
        name = f.text("name")
        path = name if folder is None else f"{folder.rstrip('/')}/{name}"
        kind, size, mode, modified = f.text("kind"), f.number("size"), f.number("mode"), f.number("modified_unix")
        shown = name.rpartition("/")[2] if folder is None else name
        return FileEntry(shown, path, kind, size, mode, modified, f.opt_text("symlink_target"))


@dataclass(frozen=True, slots=True)
class PortInfo:
    """A port of a guest."""

    port: int
    listening: bool
    access: PortAccess
    path: str
    url: str | None
    host: str | None
    token: str | None

    @staticmethod
    def read(value: object) -> PortInfo:
        f = Fields(value, "port")
        access: Any = f.text("access")
        return PortInfo(
            f.number("port"), f.flag("listening"), access, f.text("path"), f.opt_text("url"), f.opt_text("host"), f.opt_text("token")
        )


@dataclass(frozen=True, slots=True)
class FileChange:
    """A change that a watch reports."""

    change: str
    path: str

    @staticmethod
    def read(value: object) -> FileChange:
        f = Fields(value, "change")
        return FileChange(f.text("change"), f.text("path"))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copied directory. `skipped` are the symbolic links and special files that were not copied."""

    files: int
    bytes: int
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a sandbox, snapshot or workspace."""

    seq: int
    at_unix_ms: int
    kind: str
    object: str
    detail: str | None

    @staticmethod
    def read(value: Any) -> Event:
        f = Fields(value, "event")
        return Event(f.number("seq"), f.number("at_unix_ms"), f.text("kind"), f.text("object"), f.opt_text("detail"))


@dataclass(frozen=True, slots=True)
class Outcome(Generic[O, R]):
    """One run of `explore`: a result with its score, or the exception of the run."""

    option: O
    result: R | None
    score: float | None
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Exploration(Generic[S, O, R]):
    """The result of `explore`. `sandbox` is the child with the highest score; the other children are deleted."""

    sandbox: S
    option: O
    result: R
    score: float
    outcomes: tuple[Outcome[O, R], ...]
