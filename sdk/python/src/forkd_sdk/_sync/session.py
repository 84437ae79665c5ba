# Generated from `_async` by tools/generate_sync.py. Do not edit.
"""Programs with input, over a WebSocket: on a terminal, or with pipes.

The daemon kills the program when the connection closes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self


from forkd_sdk._wire import parse_line
from forkd_sdk.errors import StreamCut
from forkd_sdk.models import CommandResult, Exited, Output, Started, read_frame

if TYPE_CHECKING:
    from forkd_sdk import _sio as io


class Session:
    """A running program. Iterating yields its output until it ends; `exit_code` is then set."""

    def __init__(self, socket: io.Socket) -> None:
        self._socket = socket
        self.pid: int | None = None
        self.exit_code: int | None = None

    @classmethod
    def start(cls, socket: io.Socket, start: dict[str, Any]) -> Self:
        session = cls(socket)
        session._send(json.dumps(start))
        # The first frame says that the program runs, or why it does not.
        session._next()
        return session

    def write(self, data: bytes | str) -> None:
        """Sends data to the program's input."""
        self._send(data.encode() if isinstance(data, str) else data)

    def close_stdin(self) -> None:
        """Ends the program's input."""
        self._control(type="eof")

    def resize(self, rows: int, cols: int) -> None:
        """Sets the size of the terminal."""
        self._control(type="resize", rows=rows, cols=cols)

    def signal(self, number: int) -> None:
        """Sends a signal to the program."""
        self._control(type="signal", signal=number)

    def kill(self) -> None:
        """Kills the program and closes the connection."""
        self._socket.close()

    def _control(self, **message: Any) -> None:
        self._send(json.dumps(message))

    def _send(self, message: str | bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(message)
        except ConnectionClosed as error:
            raise StreamCut("the connection to the program is closed", self.pid) from error

    def _next(self) -> Output | None:
        from websockets.exceptions import ConnectionClosed

        if self.exit_code is not None:
            return None
        while True:
            try:
                message = self._socket.recv()
            except ConnectionClosed as error:
                raise StreamCut("the connection closed before the program ended", self.pid) from error
            if isinstance(message, bytes):
                if len(message) > 1:
                    return Output("stderr" if message[0] == 2 else "stdout", message[1:])
                continue
            frame = read_frame(parse_line(message, "terminal"))
            if isinstance(frame, Started):
                self.pid = frame.pid
                return None
            if isinstance(frame, Exited):
                self.exit_code = frame.exit_code
                return None

    def __iter__(self) -> Iterator[Output]:
        while self.exit_code is None:
            output = self._next()
            if output is not None:
                yield output

    def wait(self) -> CommandResult:
        """Reads the remaining output and returns it with the exit code."""
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        for output in self:
            parts[output.stream].append(output.data)
        stdout, stderr = (b"".join(parts[name]).decode("utf-8", "replace") for name in ("stdout", "stderr"))
        return CommandResult(stdout, stderr, self.exit_code or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


class Pty:
    """The room `pty` of a sandbox: terminals."""

    def __init__(self, http: Any, base: str) -> None:
        self._http = http
        self._base = base

    def create(
        self,
        command: str | list[str] | None = None,
        *,
        rows: int = 24,
        cols: int = 80,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """A program on a terminal; the user's shell if no command is given."""
        args = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command or [])
        start: dict[str, Any] = {"args": args, "rows": rows, "cols": cols, "env": env or {}, "cwd": cwd, "user": user}
        return Session.start(self._http.socket(f"{self._base}/terminal"), start)
