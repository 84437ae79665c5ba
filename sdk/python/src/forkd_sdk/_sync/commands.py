# Generated from `_async` by tools/generate_sync.py. Do not edit.
"""The room `commands` of a sandbox."""

from __future__ import annotations

import math
from collections.abc import Generator, Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from forkd_sdk._sync.session import Session
from forkd_sdk._wire import Fields, rows, without_none
from forkd_sdk.errors import CommandFailed, CommandTimeout, ProtocolError, StreamCut
from forkd_sdk.models import CommandResult, Exited, Frame, Output, ProcessInfo, Started, read_frame

if TYPE_CHECKING:
    from forkd_sdk._sync.http import Http

_SIGKILL = 9


def argv(command: str | Sequence[str]) -> list[str]:
    """A string is for the guest's shell; a list is a program with its arguments."""
    return ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)


class Commands:
    """Runs programs in the guest."""

    def __init__(self, http: Http, base: str) -> None:
        self._http = http
        self._base = base

    def run(
        self,
        command: str | Sequence[str],
        timeout: float = 60,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        check: bool = False,
    ) -> CommandResult:
        """Runs a command to its end.

        A code other than zero is a result; with `check` it is raised as `CommandFailed`. An expired timeout is raised as
        `CommandTimeout`, which has the output until then. Cancelling the call kills the command in the guest.
        """
        args = argv(command)
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        callbacks = {"stdout": on_stdout, "stderr": on_stderr}
        last: Exited | None = None
        with closing(self.stream(args, timeout, cwd=cwd, env=env, user=user, stdin=stdin)) as frames:
            for frame in frames:
                if isinstance(frame, Output):
                    parts[frame.stream].append(frame.data)
                    callback = callbacks[frame.stream]
                    if callback is not None:
                        callback(frame.text)
                elif isinstance(frame, Exited):
                    last = frame
        if last is None:
            raise ProtocolError("the command has no exit code")
        stdout, stderr = (b"".join(parts[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
        result = CommandResult(stdout, stderr, last.exit_code, last.timed_out)
        if result.timed_out:
            raise CommandTimeout(args, timeout, result)
        if check and not result.ok:
            raise CommandFailed(args, result)
        return result

    def stream(
        self,
        command: str | Sequence[str],
        timeout: float = 60,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
    ) -> Generator[Frame]:
        """The frames of a command as they come: `Started`, `Output`, and `Exited` as the last one.

        The command is killed when the iteration ends early.
        """
        body = _request(argv(command), timeout, cwd, env, user, stdin)
        path = f"{self._base}/exec/stream"
        with closing(_frames(self._http, "POST", path, body)) as frames:
            for frame in frames:
                yield frame

    def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | bool = False,
    ) -> Process:
        """Starts a command in the background. The command has no timeout and outlives the connection.

        A text or bytes are its whole input. With `stdin=True` its input stays open for `write`.
        """
        body = _request(argv(command), None, cwd, env, user, None)
        body["open_stdin"] = stdin is not False
        answer = self._http.json("POST", f"{self._base}/processes", json=body)
        process = self.connect(Fields(answer, "process").number("pid"))
        if not isinstance(stdin, bool):
            process.write(stdin)
            process.close_stdin()
        return process

    def open(
        self, command: str | Sequence[str], *, cwd: str | None = None, env: dict[str, str] | None = None, user: str | None = None
    ) -> Session:
        """Starts a command whose input stays open. The command is killed when the connection closes."""
        start: dict[str, Any] = {"args": argv(command), "env": env or {}, "cwd": cwd, "user": user}
        return Session.start(self._http.socket(f"{self._base}/terminal"), start)

    def connect(self, pid: int) -> Process:
        """A process that was started in the background."""
        return Process(self._http, self._base, pid)

    def list(self) -> list[ProcessInfo]:
        """The processes that were started through the API."""
        return rows(self._http.json("GET", f"{self._base}/processes"), "processes", ProcessInfo.read)


class Process:
    """A process in the background. Iterating yields its kept output, then new output, and ends with the process."""

    def __init__(self, http: Http, base: str, pid: int) -> None:
        self._http = http
        self._base = f"{base}/processes/{pid}"
        self.pid = pid
        self.exit_code: int | None = None

    def __iter__(self) -> Generator[Output]:
        try:
            with closing(_frames(self._http, "GET", f"{self._base}/output", None)) as frames:
                for frame in frames:
                    if isinstance(frame, Output):
                        yield frame
                    elif isinstance(frame, Exited):
                        self.exit_code = frame.exit_code
        except StreamCut as error:
            error.pid = self.pid
            raise

    def wait(self) -> CommandResult:
        """Waits for the end. The output is what the daemon has kept, and what came since."""
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        for output in self:
            parts[output.stream].append(output.data)
        stdout, stderr = (b"".join(parts[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
        if self.exit_code is None:
            raise ProtocolError("the process has no exit code")
        return CommandResult(stdout, stderr, self.exit_code)

    def write(self, data: str | bytes) -> None:
        """Sends data to the input of a process that was started with `stdin`."""
        content = data.encode() if isinstance(data, str) else data
        self._http.call("POST", f"{self._base}/stdin", content=content)

    def close_stdin(self) -> None:
        """Ends the input."""
        self._http.call("POST", f"{self._base}/stdin", params={"eof": "true"}, content=b"")

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        self._http.json("POST", f"{self._base}/signal", json={"signal": number})

    def kill(self) -> None:
        """Kills the process."""
        self.signal(_SIGKILL)

    def __repr__(self) -> str:
        return f"<Process {self.pid}>"


def _request(
    args: list[str],
    timeout: float | None,
    cwd: str | None,
    env: dict[str, str] | None,
    user: str | None,
    stdin: str | bytes | None,
) -> dict[str, Any]:
    if isinstance(stdin, bytes):
        # The request is JSON. Bytes that are not text go through `open`.
        stdin = stdin.decode("utf-8")
    seconds = None if timeout is None else max(1, math.ceil(timeout))
    return without_none(args=args, timeout_secs=seconds, cwd=cwd, env=env, user=user, stdin=stdin)


def _frames(http: Http, method: str, path: str, body: object) -> Generator[Frame]:
    """The frames of a process. A stream that ends without `Exited` is a `StreamCut`."""
    pid: int | None = None
    try:
        with closing(http.lines(method, path, json=body)) as lines:
            for line in lines:
                frame = read_frame(line)
                if isinstance(frame, Started):
                    pid = frame.pid
                if frame is not None:
                    yield frame
                if isinstance(frame, Exited):
                    return
    except StreamCut as error:
        error.pid = pid
        raise
    raise StreamCut("the output ended before the process did", pid)
