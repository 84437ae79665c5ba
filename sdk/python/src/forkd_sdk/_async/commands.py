"""The room `commands` of a sandbox."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from forkd_sdk._async.session import AsyncSession
from forkd_sdk._wire import Fields, rows, without_none
from forkd_sdk.errors import CommandFailed, CommandTimeout, ProtocolError, StreamCut
from forkd_sdk.models import CommandResult, Exited, Frame, Output, ProcessInfo, Started, read_frame

if TYPE_CHECKING:
    from forkd_sdk._async.http import AsyncHttp

_SIGKILL = 9


def argv(command: str | Sequence[str]) -> list[str]:
    """A string is for the guest's shell; a list is a program with its arguments."""
    return ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)


class AsyncCommands:
    """Runs programs in the guest."""

    def __init__(self, http: AsyncHttp, base: str) -> None:
        self._http = http
        self._base = base

    async def run(
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
        async with aclosing(self.stream(args, timeout, cwd=cwd, env=env, user=user, stdin=stdin)) as frames:
            async for frame in frames:
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

    async def stream(
        self,
        command: str | Sequence[str],
        timeout: float = 60,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
    ) -> AsyncGenerator[Frame]:
        """The frames of a command as they come: `Started`, `Output`, and `Exited` as the last one.

        The command is killed when the iteration ends early.
        """
        body = _request(argv(command), timeout, cwd, env, user, stdin)
        path = f"{self._base}/exec/stream"
        async with aclosing(_frames(self._http, "POST", path, body)) as frames:
            async for frame in frames:
                yield frame

    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | bool = False,
    ) -> AsyncProcess:
        """Starts a command in the background. The command has no timeout and outlives the connection.

        A text or bytes are its whole input. With `stdin=True` its input stays open for `write`.
        """
        body = _request(argv(command), None, cwd, env, user, None)
        body["open_stdin"] = stdin is not False
        answer = await self._http.json("POST", f"{self._base}/processes", json=body)
        process = self.connect(Fields(answer, "process").number("pid"))
        if not isinstance(stdin, bool):
            await process.write(stdin)
            await process.close_stdin()
        return process

    async def open(
        self, command: str | Sequence[str], *, cwd: str | None = None, env: dict[str, str] | None = None, user: str | None = None
    ) -> AsyncSession:
        """Starts a command whose input stays open. The command is killed when the connection closes."""
        start: dict[str, Any] = {"args": argv(command), "env": env or {}, "cwd": cwd, "user": user}
        return await AsyncSession.start(await self._http.socket(f"{self._base}/terminal"), start)

    def connect(self, pid: int) -> AsyncProcess:
        """A process that was started in the background."""
        return AsyncProcess(self._http, self._base, pid)

    async def list(self) -> list[ProcessInfo]:
        """The processes that were started through the API."""
        return rows(await self._http.json("GET", f"{self._base}/processes"), "processes", ProcessInfo.read)


class AsyncProcess:
    """A process in the background. Iterating yields its kept output, then new output, and ends with the process."""

    def __init__(self, http: AsyncHttp, base: str, pid: int) -> None:
        self._http = http
        self._base = f"{base}/processes/{pid}"
        self.pid = pid
        self.exit_code: int | None = None

    async def __aiter__(self) -> AsyncGenerator[Output]:
        try:
            async with aclosing(_frames(self._http, "GET", f"{self._base}/output", None)) as frames:
                async for frame in frames:
                    if isinstance(frame, Output):
                        yield frame
                    elif isinstance(frame, Exited):
                        self.exit_code = frame.exit_code
        except StreamCut as error:
            error.pid = self.pid
            raise

    async def wait(self) -> CommandResult:
        """Waits for the end. The output is what the daemon has kept, and what came since."""
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        async for output in self:
            parts[output.stream].append(output.data)
        stdout, stderr = (b"".join(parts[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
        if self.exit_code is None:
            raise ProtocolError("the process has no exit code")
        return CommandResult(stdout, stderr, self.exit_code)

    async def write(self, data: str | bytes) -> None:
        """Sends data to the input of a process that was started with `stdin`."""
        content = data.encode() if isinstance(data, str) else data
        await self._http.call("POST", f"{self._base}/stdin", content=content)

    async def close_stdin(self) -> None:
        """Ends the input."""
        await self._http.call("POST", f"{self._base}/stdin", params={"eof": "true"}, content=b"")

    async def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        await self._http.json("POST", f"{self._base}/signal", json={"signal": number})

    async def kill(self) -> None:
        """Kills the process."""
        await self.signal(_SIGKILL)

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


async def _frames(http: AsyncHttp, method: str, path: str, body: object) -> AsyncGenerator[Frame]:
    """The frames of a process. A stream that ends without `Exited` is a `StreamCut`."""
    pid: int | None = None
    try:
        async with aclosing(http.lines(method, path, json=body)) as lines:
            async for line in lines:
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
