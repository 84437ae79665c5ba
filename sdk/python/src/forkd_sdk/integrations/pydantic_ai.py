"""Pydantic AI: a workspace backend whose files and commands are those of a sandbox.

    agent.run_sync("...", workspace=ForkdWorkspace("py"))

The first operation starts a sandbox from the snapshot. `fork` copies the workspace with its processes; `checkpoint` and
`rollback` undo a run of the agent.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from pydantic_ai.workspaces import CommandResult, FileEntry, WorkspaceRef, WorkspaceTimeoutError, WorkspaceUnavailableError

from forkd_sdk import ApiError, AsyncSandbox, Checkpoint, CommandTimeout, ConnectionFailed, FileMissing, NotFound, Rollback, SandboxGone
from forkd_sdk.integrations._session import client

_LONG = 24 * 3600
# Sentences of the guest's kernel, and the errors that Python has for them.
_ERRORS: tuple[tuple[str, type[OSError]], ...] = (
    ("not a directory", NotADirectoryError),
    ("is a directory", IsADirectoryError),
    ("permission denied", PermissionError),
    # A directory could not be made because a file has its name.
    ("file exists", NotADirectoryError),
    ("no such file", FileNotFoundError),
)


class ForkdWorkspace:
    """One sandbox as a workspace. `ref` attaches to a sandbox that runs; otherwise the first operation starts one."""

    def __init__(
        self, tag: str | None = None, *, ref: WorkspaceRef | None = None, directory: str = "/root", ttl: int | None = 3600
    ) -> None:
        if (tag is None) == (ref is None):
            raise ValueError("exactly one of tag and ref is needed")
        self._tag = tag
        self._ref = ref
        self._directory = directory
        self._ttl = ttl
        self._sandbox: AsyncSandbox | None = None
        self._lock = asyncio.Lock()

    @property
    def ref(self) -> WorkspaceRef | None:
        """The reference by which a later process finds the sandbox again; none before the first operation."""
        return self._ref

    async def sandbox(self) -> AsyncSandbox:
        """The sandbox, started or attached by the first call."""
        async with self._lock:
            if self._sandbox is None:
                with _Errors("the sandbox"):
                    if self._ref is not None:
                        self._sandbox = await AsyncSandbox.connect(self._ref.id, client=client())
                    else:
                        self._sandbox = await AsyncSandbox.create(str(self._tag), client=client(), ttl=self._ttl)
                self._ref = WorkspaceRef(provider="forkd", id=self._sandbox.id)
            return self._sandbox

    async def working_dir(self) -> str:
        """The directory of relative paths and commands."""
        await self.sandbox()
        return self._directory

    def _path(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._directory, path))

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Runs a command to its end. Children that it leaves behind do not hold the answer up."""
        if isinstance(command, str) != shell:
            raise TypeError("a string needs shell=True, a list of arguments shell=False")
        sandbox = await self.sandbox()
        args = command if isinstance(command, str) else list(command)
        with _Errors("the command"):
            result = await sandbox.commands.run(args, timeout or _LONG, cwd=self._directory, env=dict(env or {}))
        return CommandResult(exit_code=result.exit_code, stdout=result.stdout, stderr=result.stderr)

    async def _describe(self, path: str) -> dict[str, Any]:
        sandbox = await self.sandbox()
        with _Errors(path):
            answer = await sandbox.client.http.json("GET", f"/v1/sandboxes/{sandbox.id}/files/stat", params={"path": path})
        if not isinstance(answer, dict):
            raise OSError(f"{path}: the answer has no fields")
        return answer

    async def read_bytes(self, path: str) -> bytes:
        """The content of a file."""
        full = await self.realpath(path)
        kind = (await self._describe(full))["kind"]
        if kind == "dir":
            raise IsADirectoryError(path)
        if kind != "file":
            raise OSError(f"{path} is not a regular file")
        sandbox = await self.sandbox()
        with _Errors(path):
            return await sandbox.files.read_bytes(full)

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Writes a file; missing directories are made. A link is followed, so that its target is written."""
        sandbox = await self.sandbox()
        full = await self.realpath(self._path(path))
        with _Errors(path):
            await sandbox.files.write(full, data)

    async def stat(self, path: str) -> FileEntry:
        """Describes a file or directory; links are followed."""
        full = self._path(path)
        found = await self._describe(full)
        if found["kind"] == "symlink":
            found = await self._describe(await self.realpath(full))
        is_dir = found["kind"] == "dir"
        return FileEntry(name=posixpath.basename(full), path=full, is_dir=is_dir, size=None if is_dir else found["size"])

    async def list_dir(self, path: str) -> list[FileEntry]:
        """The entries of a directory. A link that leads nowhere is no directory."""
        full = self._path(path)
        if not (await self.stat(full)).is_dir:
            raise NotADirectoryError(path)
        sandbox = await self.sandbox()
        with _Errors(path):
            found = await sandbox.files.list(full)
        entries: list[FileEntry] = []
        for one in found:
            is_dir = one.kind == "dir"
            if one.kind == "symlink":
                try:
                    is_dir = (await self.stat(one.path)).is_dir
                except OSError:
                    is_dir = False
            entries.append(FileEntry(name=one.name, path=one.path, is_dir=is_dir, size=None if is_dir else one.size))
        return entries

    async def make_dir(self, path: str) -> None:
        """Makes a directory and its parents."""
        full = self._path(path)
        if await self.exists(full) and not (await self.stat(full)).is_dir:
            raise FileExistsError(path)
        sandbox = await self.sandbox()
        with _Errors(path):
            await sandbox.files.mkdir(full)

    async def remove(self, path: str) -> None:
        """Removes a file, or a directory with everything in it. The working directory and those above it stay."""
        full = self._path(path)
        if posixpath.commonpath([full, self._directory]) == full:
            raise ValueError(f"{path} holds the working directory")
        sandbox = await self.sandbox()
        with _Errors(path):
            await sandbox.files.remove(full, recursive=True)

    async def exists(self, path: str) -> bool:
        """Whether there is a file or directory."""
        try:
            await self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def realpath(self, path: str) -> str:
        """The path without links. Names that do not exist stay as they are."""
        # Not normalised before: `link/..` is the parent of the link's target.
        full = posixpath.join(self._directory, path)
        result = await self.run(["realpath", "-m", "--", full])
        if result.exit_code != 0:
            raise OSError(result.stderr)
        return result.stdout.removesuffix("\n")

    # ---- beyond the interface of the framework

    async def fork(self, n: int = 1) -> list[Self]:
        """Copies of the workspace as it is now."""
        children = await (await self.sandbox()).fork(n, ttl=self._ttl)
        return [
            type(self)(ref=WorkspaceRef(provider="forkd", id=child.id), directory=self._directory, ttl=self._ttl) for child in children
        ]

    async def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Keeps this moment."""
        return await (await self.sandbox()).checkpoint(name)

    async def rollback(self, to: str | Checkpoint | None = None) -> Rollback:
        """Returns to a checkpoint: files, memory and processes."""
        return await (await self.sandbox()).rollback(to)

    async def close(self) -> None:
        """Deletes the sandbox, if there is one."""
        if self._sandbox is not None:
            await self._sandbox.kill()


class _Errors:
    """Turns errors of the client into those that the framework expects."""

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, CommandTimeout):
            raise WorkspaceTimeoutError(str(error)) from error
        if isinstance(error, FileMissing):
            raise FileNotFoundError(self._subject) from error
        if isinstance(error, (SandboxGone, NotFound, ConnectionFailed)):
            raise WorkspaceUnavailableError(str(error)) from error
        if isinstance(error, ApiError):
            if error.code == "agent_unreachable":
                raise WorkspaceUnavailableError(str(error)) from error
            text = str(error).lower()
            for words, named in _ERRORS:
                if words in text:
                    raise named(self._subject) from error
