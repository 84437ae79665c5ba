"""Errors of the client.

Every error of this package is a `ForkdError`. A refusal of the daemon is an `ApiError` with the daemon's code; each code
that a program may want to handle has a class of its own. Failures of the connection are `ConnectionFailed`,
`RequestTimeout`, `StreamCut` and `SandboxUnreachable`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd_sdk.models import CommandResult, Evaluation


class ForkdError(Exception):
    """Base of all errors of this package."""


class InvalidAddress(ForkdError, ValueError):
    """The address of the daemon is malformed."""


class ConnectionFailed(ForkdError, ConnectionError):
    """The daemon cannot be reached, or the connection broke."""


class RequestTimeout(ForkdError, TimeoutError):
    """The daemon did not answer within the timeout of the client."""


class ProtocolError(ForkdError):
    """An answer of the daemon is malformed."""


class StreamCut(ConnectionFailed):
    """A stream ended without its last frame.

    `pid` is the process in the guest, if it is known. A process that was started with `commands.start` goes on, and
    `commands.connect(pid)` follows it again.
    """

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class SandboxUnreachable(StreamCut):
    """A stream was silent for longer than the daemon allows: the daemon or the sandbox is gone."""


class ControllerError(ForkdError):
    """A refusal of the daemon, with the fields of the `forkd` 0.5.3 client."""

    def __init__(self, status: int, body: Any, url: str) -> None:
        super().__init__(f"HTTP {status} from {url}: {body}")
        self.status = status
        self.body = body
        self.url = url


class ApiError(ControllerError):
    """A refusal of the daemon."""

    def __init__(self, status: int, body: Any, url: str) -> None:
        super().__init__(status, body, url)
        fields = _fields(body)
        self.code: str = _text(fields.get("code")) or "unknown"
        self.message: str = _text(fields.get("error")) or f"HTTP {status}"
        self.hint: str | None = _text(fields.get("hint"))
        self.request_id: str | None = _text(fields.get("request_id"))

    def __str__(self) -> str:
        text = f"{self.message} ({self.code})"
        if self.request_id:
            text = f"{self.message} ({self.code}, request {self.request_id})"
        return f"{text}; {self.hint}" if self.hint else text


def _fields(body: object) -> dict[str, Any]:
    return cast("dict[str, Any]", body) if isinstance(body, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


class InvalidRequest(ApiError):
    """A field, name or body is invalid."""


class AuthError(ApiError):
    """The token is missing or unknown, or its role does not allow the request."""


class NotFound(ApiError):
    """The object does not exist, or belongs to another owner."""


class SandboxNotFound(NotFound):
    """There is no such sandbox."""


class SnapshotNotFound(NotFound):
    """There is no such snapshot."""


class FileMissing(NotFound, FileNotFoundError):
    """There is no such file in the guest."""

    # `OSError` has its own `__str__`, which prints the arguments of the constructor.
    __str__ = ApiError.__str__


class ProcessNotFound(NotFound):
    """There is no such process in the guest."""


class CheckpointNotFound(NotFound):
    """There is no such checkpoint."""


class AlreadyExists(ApiError):
    """The name is in use."""


class WrongState(ApiError):
    """The state of the object does not allow the operation."""


class SandboxGone(ApiError):
    """The VM ended."""


class IdempotencyMismatch(ApiError):
    """The idempotency key belongs to another request."""


class Busy(ApiError):
    """The daemon or the object is busy, and stayed busy for all retries."""


class LimitReached(ApiError):
    """A limit of the daemon; the message names it."""


class LaunchFailed(ApiError):
    """A VM could not be started."""


class AgentFailed(ApiError):
    """The agent in the guest refused, failed, or does not answer."""


class OperationTimeout(ApiError, TimeoutError):
    """An operation of the daemon exceeded its timeout."""

    __str__ = ApiError.__str__


class NoSpace(ApiError):
    """The disk of the host is full."""


class RegistryFailed(ApiError):
    """A registry of container images refuses, fails or cannot be reached."""


class Unsupported(ApiError):
    """Not possible with this configuration or build of the daemon."""


_BY_CODE: dict[str, type[ApiError]] = {
    "invalid_request": InvalidRequest,
    "invalid_name": InvalidRequest,
    "policy_invalid": InvalidRequest,
    "unsupported_media_type": InvalidRequest,
    "too_large": InvalidRequest,
    "no_such_route": NotFound,
    "method_not_allowed": InvalidRequest,
    "missing_token": AuthError,
    "invalid_token": AuthError,
    "forbidden": AuthError,
    "sandbox_not_found": SandboxNotFound,
    "snapshot_not_found": SnapshotNotFound,
    "workspace_not_found": NotFound,
    "image_not_found": NotFound,
    "image_invalid": InvalidRequest,
    "registry_denied": RegistryFailed,
    "registry_failed": RegistryFailed,
    "dockerfile_invalid": InvalidRequest,
    "unsupported_instruction": InvalidRequest,
    "step_failed": WrongState,
    "operation_not_found": NotFound,
    "token_not_found": NotFound,
    "secret_not_found": NotFound,
    "node_not_found": NotFound,
    "node_lost": Busy,
    "checkpoint_not_found": CheckpointNotFound,
    "process_not_found": ProcessNotFound,
    "file_not_found": FileMissing,
    "already_exists": AlreadyExists,
    "snapshot_not_ready": WrongState,
    "snapshot_broken": WrongState,
    "snapshot_incompatible": WrongState,
    "has_dependents": WrongState,
    "wrong_state": WrongState,
    "idempotency_mismatch": IdempotencyMismatch,
    "limit_reached": LimitReached,
    "rate_limited": Busy,
    "busy": Busy,
    "shutting_down": Busy,
    "agent_unreachable": AgentFailed,
    "port_closed": NotFound,
    "port_in_use": WrongState,
    "network_unavailable": Unsupported,
    "agent_failed": AgentFailed,
    "timeout": OperationTimeout,
    "sandbox_gone": SandboxGone,
    "launch_failed": LaunchFailed,
    "invalid_artifact": InvalidRequest,
    "digest_mismatch": InvalidRequest,
    "untrusted_signature": WrongState,
    "contains_secrets": WrongState,
    "no_space": NoSpace,
    "unsupported": Unsupported,
}


def api_error(status: int, body: Any, url: str) -> ApiError:
    """The error class of a refusal. An unknown code is a plain `ApiError`."""
    code = _text(_fields(body).get("code"))
    return _BY_CODE.get(code or "", ApiError)(status, body, url)


class CommandFailed(ForkdError):
    """A command ended with a code other than zero, and `check` was set."""

    def __init__(self, command: Sequence[str], result: CommandResult) -> None:
        last = result.stderr.strip().splitlines()[-1:] or [""]
        super().__init__(f"{list(command)} ended with {result.exit_code}: {last[0]}")
        self.command = list(command)
        self.result = result


class CommandTimeout(ForkdError, TimeoutError):
    """A command was killed because its timeout expired. `result` has the output until then."""

    def __init__(self, command: Sequence[str], timeout: float, result: CommandResult) -> None:
        super().__init__(f"{list(command)} was killed after {timeout:g} s")
        self.command = list(command)
        self.result = result


class EvalError(ForkdError, RuntimeError):
    """Code in the interpreter raised an exception. `traceback` is the guest's."""

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__(evaluation.error or "the interpreter failed")
        self.evaluation = evaluation
        self.traceback = evaluation.traceback


class ForkError(ForkdError):
    """Some children did not start. `children` are those that run, `errors` the refusals of the others."""

    def __init__(self, children: Sequence[Any], errors: Sequence[ApiError]) -> None:
        total = len(children) + len(errors)
        first = f": {errors[0]}" if errors else ""
        super().__init__(f"{len(errors)} of {total} children did not start{first}")
        self.children = list(children)
        self.errors = list(errors)


class ExploreError(ForkdError):
    """Every run of `explore` failed. `errors` has one exception per option, in order."""

    def __init__(self, errors: Sequence[BaseException]) -> None:
        super().__init__(f"all {len(errors)} runs failed: {errors[0]!r}" if errors else "no run")
        self.errors = list(errors)
