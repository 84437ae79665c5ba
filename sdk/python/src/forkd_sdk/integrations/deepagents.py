"""deepagents and LangGraph: a backend whose files and commands are those of a sandbox.

    from deepagents import create_deep_agent
    from forkd_sdk.integrations.deepagents import ForkdSandbox

    with ForkdSandbox.create("py") as backend:
        agent = create_deep_agent(model=..., backend=backend)

`checkpoint` and `rollback` undo what an agent did; `fork` gives copies of the sandbox, one for each way to try.
"""

from __future__ import annotations

import posixpath
from types import TracebackType
from typing import Self

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from forkd_sdk import ApiError, Checkpoint, Client, CommandTimeout, FileMissing, Rollback, Sandbox

_TIMEOUT = 30 * 60
_MAX_OUTPUT = 100_000


def _reason(error: ApiError, path: str) -> str:
    """The reason as the framework spells it, else the sentence of the daemon."""
    if isinstance(error, FileMissing):
        return "file_not_found"
    text = str(error).lower()
    if "permission denied" in text:
        return "permission_denied"
    if "is a directory" in text or "not a regular file" in text:
        return "is_directory"
    return "invalid_path" if not posixpath.isabs(path) else str(error)


class ForkdSandbox(BaseSandbox):
    """One sandbox as a backend. As a context manager it deletes the sandbox at the end."""

    def __init__(self, sandbox: Sandbox, *, timeout: int = _TIMEOUT) -> None:
        self.sandbox = sandbox
        self._timeout = timeout

    @classmethod
    def create(cls, tag: str, *, client: Client | None = None, ttl: int | None = 3600, timeout: int = _TIMEOUT) -> Self:
        """Starts a sandbox from a snapshot."""
        return cls(Sandbox.create(tag, client=client, ttl=ttl), timeout=timeout)

    @property
    def id(self) -> str:
        """The ID of the sandbox."""
        return self.sandbox.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a shell command; both outputs are one text."""
        parts: list[str] = []
        code = 124
        try:
            result = self.sandbox.commands.run(
                ["/bin/sh", "-c", command], timeout or self._timeout, on_stdout=parts.append, on_stderr=parts.append
            )
            code = result.exit_code
        except CommandTimeout as error:
            parts.append(f"\n{error}")
        output = "".join(parts)
        return ExecuteResponse(output=output[:_MAX_OUTPUT], exit_code=code, truncated=len(output) > _MAX_OUTPUT)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Writes files. A failure is part of the answer."""
        return [FileUploadResponse(path=path, error=self._write(path, data)) for path, data in files]

    def _write(self, path: str, data: bytes) -> str | None:
        if not posixpath.isabs(path):
            return "invalid_path"
        try:
            self.sandbox.files.write(path, data)
        except ApiError as error:
            return _reason(error, path)
        return None

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Reads files. A failure is part of the answer."""
        return [self._read(path) for path in paths]

    def _read(self, path: str) -> FileDownloadResponse:
        if not posixpath.isabs(path):
            return FileDownloadResponse(path=path, content=None, error="invalid_path")
        try:
            return FileDownloadResponse(path=path, content=self.sandbox.files.read_bytes(path), error=None)
        except ApiError as error:
            return FileDownloadResponse(path=path, content=None, error=_reason(error, path))

    # ---- beyond the interface of the framework

    def fork(self, n: int = 1) -> list[Self]:
        """Copies of the sandbox as it is now, each a backend of its own."""
        return [type(self)(child, timeout=self._timeout) for child in self.sandbox.fork(n)]

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Keeps this moment. Pair its name with a checkpoint of the graph to travel back with both."""
        return self.sandbox.checkpoint(name)

    def rollback(self, to: str | Checkpoint | None = None) -> Rollback:
        """Returns to a checkpoint: files, memory and processes."""
        return self.sandbox.rollback(to)

    def close(self) -> None:
        """Deletes the sandbox."""
        self.sandbox.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
